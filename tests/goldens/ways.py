"""Ways to train a golden, all with the same methods."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from npu_bridge import stages
from npu_bridge.amp.custom_loops import scale_loss, unscaled_gradients
from npu_bridge.amp.groups import scale_boundary
from npu_bridge.estimator.npu.npu_helpers import npu_keras_optimizer
from npu_bridge.estimator.npu.npu_hook import broadcast_global_variables
from npu_bridge.estimator.npu.npu_loss_scale_optimizer import NPULossScaleOptimizer
from npu_bridge.estimator.npu.npu_optimizer import NPUDistributedOptimizer, NPUOptimizer
from npu_bridge.gradients.stage import variables_of
from tests.goldens.problems import LAYERS
from tests.goldens.two_layers import as_built_by_many

tf1 = tf.compat.v1


class Seen(NamedTuple):
    """The state after a step, with the report of its optimizer, if any, and its losses."""

    values: dict
    scales: tuple
    report: object = None
    losses: object = None


def _mark_of(golden):
    """Returns boundaries of groups around the tensors between layers."""
    if not golden.groups:
        return None
    names = [f"layer_{number}/" for number in range(LAYERS)]
    groups = [next(n for n, pattern in enumerate(golden.groups, 1) if re.search(pattern, name)) for name in names]
    return lambda x, i, j: scale_boundary(x, groups[i], [*groups, 0][j])


class InGraph:
    """A TF 1 graph with `NPUOptimizer`; its checkpoints are paths from which other graphs can resume."""

    def __init__(self, golden, is_tailing=False, **settings):
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.variables = {
                name: tf1.get_variable(name, initializer=value, use_resource=not name.endswith(("vector", "bias")))
                for name, value in golden.problem.start_values().items()
            }
            self._fed = {
                key: tf1.placeholder(value.dtype, value.shape) for key, value in golden.problem.fed_to(0, 1)[0].items()
            }
            self.count = tf1.train.get_or_create_global_step()
            optimizer = _optimizer_of(golden, is_tailing, settings)
            self._losses = golden.problem.losses_of(self.variables, self._fed, _mark_of(golden))
            self.pairs = optimizer.compute_gradients(self._losses if len(self._losses) > 1 else self._losses[0])
            self.train_op = optimizer.apply_gradients(self.pairs, self.count)
            self._fetched = {"train": self.train_op, "losses": self._losses, "report": optimizer.last_step}
            self._sync_op = stages.sync_all(optimizer) if is_apart(golden) else None
            self.saver = tf1.train.Saver()
            self.session = tf1.Session(config=as_built_by_many())
            self.session.run(tf1.global_variables_initializer())
            self._all_variables = tf1.global_variables()

    def feed(self, grads):
        return {self._fed[key]: value for key, value in grads.items()}

    def train(self, fed):
        trace = []
        for grads in fed:
            found = self.session.run(self._fetched, self.feed(grads))
            trace.append(Seen(self.values(), found["report"].loss_scale, found["report"], found["losses"]))
        return trace

    def values(self):
        return self.session.run(self.variables)

    def updates(self):
        return int(self.session.run(self.count))

    def everything(self):
        return self.session.run({variable.name: variable for variable in self._all_variables})

    def sync(self):
        self.session.run(self._sync_op)

    def broadcast(self):
        with self.graph.as_default():
            self.session.run(broadcast_global_variables(0))

    def save(self, path):
        with self.graph.as_default():
            return self.saver.save(self.session, path, write_meta_graph=False)

    def restore(self, path):
        with self.graph.as_default():
            self.saver.restore(self.session, path)


def _optimizer_of(golden, is_tailing, settings):
    inner = tf1.train.GradientDescentOptimizer(golden.rate)
    if golden.momentum:
        inner = tf1.train.MomentumOptimizer(golden.rate, golden.momentum)
    managers, added = golden.made_managers(), golden.made_stages()
    if golden.is_sharded:
        shared = NPUDistributedOptimizer(inner, is_weight_update_sharding=True, name="golden")
        return NPULossScaleOptimizer(shared, managers, is_distributed=True)
    return NPUOptimizer(inner, managers, True, True, is_tailing, name="golden", stages=added, **settings)


def is_apart(golden):
    """Returns whether ranks keep values that differ."""
    apart = ("PartialSync", "TopK", "Threshold", "Accumulate")
    return any(table["stage"] in apart and "exchange" not in table for table in golden.stages)


class _Objects:
    """A base for Keras optimizers: has `variables` by name, `optimizer` and `checkpoint`."""

    def values(self):
        return {name: variable.numpy() for name, variable in self.variables.items()}

    def updates(self):
        return int(self.optimizer.iterations)

    def save(self, path):
        return self.checkpoint.write(path)

    def restore(self, path):
        self.checkpoint.read(path)

    def everything(self):
        variables = self.optimizer.variables
        own = variables() if callable(variables) else variables
        return {**self.values(), **{str(position): variable.numpy() for position, variable in enumerate(own)}}

    def sync(self):
        stages.sync_all(self.optimizer)


class InLoop(_Objects):
    """A loop around an optimizer of Keras, by `minimize` or by `scale_loss` around each pass of a tape."""

    def __init__(self, golden, generation=tf.keras.optimizers, is_function=True, is_minimize=False):
        self._golden, self._is_minimize = golden, is_minimize
        self.variables = {key: tf.Variable(value, name=key) for key, value in golden.problem.start_values().items()}
        inner = generation.SGD(golden.rate, golden.momentum)
        self.optimizer = npu_keras_optimizer(inner, golden.made_managers(), stages=golden.made_stages())
        self._step = tf.function(self._step_of) if is_function else self._step_of

    def _step_of(self, fed):
        variables = list(self.variables.values())
        if self._is_minimize:
            self.optimizer.minimize(lambda: self._losses_of(fed)[0], variables)
            return None
        with tf.GradientTape(persistent=True) as tape:
            losses = self._losses_of(fed)
        for loss_id, loss in enumerate(losses):
            with scale_loss(loss, self.optimizer, loss_id=loss_id) as scaled:
                scaled.backward(tape, variables)
        self.optimizer.apply_gradients(unscaled_gradients(self.optimizer))
        return losses

    def _losses_of(self, fed):
        return self._golden.problem.losses_of(self.variables, fed, _mark_of(self._golden))

    def train(self, fed):
        trace = []
        for grads in fed:
            losses = self._step({key: tf.constant(value) for key, value in grads.items()})
            report = self.optimizer.last_step
            trace.append(Seen(self.values(), report.loss_scale, report, losses and [float(loss) for loss in losses]))
        return trace


class InPipeline(_Objects):
    """A loop around a `tf.GradientTape` with a pipeline, in a `tf.function` or executed eagerly."""

    def __init__(self, golden, is_eager=False, is_own_tape=False):
        self._golden, self._is_own_tape, self.counted = golden, is_own_tape, Counted()
        self.variables = {key: tf.Variable(value, name=key) for key, value in golden.problem.start_values().items()}
        self._manager = golden.made_managers()
        self.optimizer = tf.keras.optimizers.legacy.SGD(golden.rate, golden.momentum)
        self._pipeline = stages.pipeline(
            "eagerly" if is_eager else "in_function",
            self._manager,
            is_distributed=True,
            stages=golden.made_stages(),
            inner=self.optimizer,
        )
        self._step = self._step_of if is_eager else tf.function(self._step_of)
        named = {key.replace("/", "_"): variable for key, variable in self.variables.items()}
        self.checkpoint = tf.train.Checkpoint(optimizer=self.optimizer, **named, **self._pipeline.state())

    def _step_of(self, fed):
        step = self._pipeline.begin()
        with tf.GradientTape() as tape:
            (loss,) = self._golden.problem.losses_of(self.variables, fed, self.counted.mark)
            loss = self._pipeline.scale(loss, step)
        variables = list(self.variables.values())
        if self._is_own_tape:
            grads = tape.gradient(loss, variables)
        else:
            grads = self._pipeline.gradients(step, tape, loss, variables)
        grads_and_vars = self._pipeline.combine(step, zip(grads, variables))
        self._pipeline.apply(step, grads_and_vars, self.optimizer.apply_gradients)
        return step.loss_scale

    def train(self, fed):
        return [
            Seen(self.values(), (float(scale),))
            for scale in (self._step({key: tf.constant(value) for key, value in grads.items()}) for grads in fed)
        ]

    def everything(self):
        own = [*variables_of(self._pipeline.state()), *self.optimizer.variables()]
        return {**self.values(), **{re.sub(".*SGD/", "", variable.name): variable.numpy() for variable in own}}

    def sync(self):
        stages.sync_all(self._pipeline)


class InFit(_Objects):
    """Keras `fit` with `npu_keras_optimizer`."""

    def __init__(self, golden, generation=tf.keras.optimizers.legacy, is_counted=True, **settings):
        self.counted = Counted() if is_counted else None
        self.model = _Model(golden.problem, self.counted)
        self.variables = self.model.named
        inner = generation.SGD(golden.rate, golden.momentum)
        self.optimizer = npu_keras_optimizer(inner, golden.made_managers(), stages=golden.made_stages())
        self.model.compile(self.optimizer, loss=lambda _, loss: loss, **settings)
        self.checkpoint = tf.train.Checkpoint(model=self.model, optimizer=self.optimizer)

    def train(self, fed):
        inputs, scales, trace = {key: np.stack([grads[key] for grads in fed]) for key in fed[0]}, [], []
        note = tf.keras.callbacks.LambdaCallback(
            on_train_batch_begin=lambda *_: scales.append(float(self.optimizer.loss_scale)),
            on_train_batch_end=lambda *_: trace.append(Seen(self.values(), scales[-1:])),
        )
        labels = np.zeros([len(fed), 1], np.float32)
        self.model.fit(inputs, labels, batch_size=1, shuffle=False, verbose=0, callbacks=[note])
        return trace


class _Model(tf.keras.Model):
    """A model whose output is the loss of a problem, for a batch with the feeds of one step."""

    def __init__(self, problem, counted):
        super().__init__()
        self.named = {
            key: self.add_weight(key, value.shape, initializer=tf.keras.initializers.Constant(value))
            for key, value in problem.start_values().items()
        }
        self._problem, self._counted = problem, counted

    def call(self, inputs):
        fed = {key: value[0] for key, value in inputs.items()}
        (loss,) = self._problem.losses_of(self.named, fed, self._counted and self._counted.mark)
        return tf.reshape(loss, [1, 1])


class InEagerOfTf1(_Objects):
    """A loop around an `NPUOptimizer` without a graph."""

    def __init__(self, golden):
        self._problem = golden.problem
        self.variables = {key: tf.Variable(value, name=key) for key, value in golden.problem.start_values().items()}
        self.optimizer, self._updates = _optimizer_of(golden, False, {}), 0

    def train(self, fed):
        return [self._trained(grads) for grads in fed]

    def _trained(self, grads):
        losses = [lambda number=number: self._problem.losses_of(self.variables, grads)[number] for number in (0, 1)]
        self.optimizer.apply_gradients(self.optimizer.compute_gradients(losses, list(self.variables.values())))
        report = tf.nest.map_structure(lambda tensor: tensor.numpy().item(), self.optimizer.last_step)
        self._updates += not report.overflow
        return Seen(self.values(), report.loss_scale, report)

    def updates(self):
        return self._updates


class Counted:
    """Counts how often the backward pass of each layer is computed."""

    def __init__(self):
        self.runs = [0] * LAYERS

    def mark(self, x, number, _):
        """Marks the output of a layer with an identity whose gradient counts."""

        def count(grad):
            self.runs[number] += 1
            return grad

        @tf.custom_gradient
        def identity(x):
            def backward(grad):
                counted = tf.numpy_function(count, [grad], grad.dtype, stateful=False)
                return tf.ensure_shape(counted, grad.shape)

            return tf.identity(x), backward

        return identity(x)


WAYS = {
    "graph": InGraph,
    "graph, tailed": functools.partial(InGraph, is_tailing=True),
    "function": InPipeline,
    "function, own tape": functools.partial(InPipeline, is_own_tape=True),
    "eager": functools.partial(InPipeline, is_eager=True),
    "fit, legacy": InFit,
    "fit, current": functools.partial(InFit, generation=tf.keras.optimizers),
    "minimize": functools.partial(InLoop, is_minimize=True),
    "passes": InLoop,
    "passes, legacy": functools.partial(InLoop, generation=tf.keras.optimizers.legacy),
    "passes, eager": functools.partial(InLoop, is_function=False),
    "eager, of TF 1": InEagerOfTf1,
}
