"""Training of four layers of which some are frozen, in each of the ways to train, against numpy."""

from __future__ import annotations

import functools
import re

import numpy as np
import tensorflow as tf

from npu_bridge import collective, stages
from npu_bridge.estimator.npu.npu_helpers import npu_keras_optimizer
from npu_bridge.estimator.npu.npu_loss_scale_manager import ExponentialUpdateLossScaleManager
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
from npu_bridge.gradients.pipeline import variables_of
from tests.freeze_models import (
    CHAINS,
    FIRST_SCALE,
    FROZEN,
    GROWS_EVERY,
    LAYERS,
    MOMENTUM,
    NORM,
    RATE,
    ROWS,
    SCHEDULE,
    SEQUENCE,
    WIDTH,
    batches_of,
    expected_runs,
    in_numpy,
    start_values,
)
from tests.saved_trainings import SavedModel, SavedObjects, SavedSession
from tests.transfers import is_transfer

tf1 = tf.compat.v1


def made(chain):
    """The stages of a chain."""
    settings = CHAINS[chain]
    added = [stages.Freeze(SCHEDULE)]
    added += [stages.ClipByGlobalNorm(NORM)] if "norm" in settings else []
    added += [stages.Accumulate(settings["window"])] if "window" in settings else []
    return added + ([stages.ClipLocally(settings["local"])] if "local" in settings else [])


def dynamic():
    return ExponentialUpdateLossScaleManager(FIRST_SCALE, GROWS_EVERY, 1, 2, 0.5)


class Counted:
    """Counts how often the backward pass of each layer is computed."""

    def __init__(self):
        self.runs = [0] * LAYERS

    def identity(self, number):
        """An identity at the input of a layer; its gradient counts."""

        def count(grad):
            self.runs[number] += 1
            return grad

        @tf.custom_gradient
        def identity(x):
            def backward(grad):
                counted = tf.numpy_function(count, [grad], grad.dtype, stateful=False)
                return tf.ensure_shape(counted, grad.shape)

            return tf.identity(x), backward

        return identity


def outputs_of(variables, x, counted=None):
    """The outputs of the layers, by the names of their variables."""
    for number in range(LAYERS):
        with tf.name_scope(f"layer_{number}"):
            kernel, bias = (variables[f"layer_{number}/{kind}"] for kind in ("kernel", "bias"))
            # A layer's output instead of its input, so that the first layer has a gradient to count, too.
            x = tf.matmul(x, kernel) + bias
            x = tf.tanh(x if counted is None else counted.identity(number)(x))
    return x


class InGraph(SavedSession):
    """A TF 1 graph with `NPUOptimizer`."""

    def __init__(self, chain, is_tailing=False, name="frozen", **settings):
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.variables = {
                name: tf1.get_variable(name, initializer=value, use_resource="kernel" in name)
                for name, value in start_values().items()
            }
            self._fed = [tf1.placeholder(tf.float32, [ROWS, WIDTH]) for _ in range(2)]
            self.count = tf1.train.get_or_create_global_step()
            loss = tf.reduce_mean(tf.square(outputs_of(self.variables, self._fed[0]) - self._fed[1]))
            manager = dynamic()
            inner = tf1.train.MomentumOptimizer(RATE, MOMENTUM)
            added = made(chain)
            optimizer = NPUOptimizer(inner, manager, True, True, is_tailing, name=name, stages=added, **settings)
            self._scale = manager.get_loss_scale()
            self.pairs = optimizer.compute_gradients(loss)
            self.train_op = optimizer.apply_gradients(self.pairs, self.count)
            self.saver = tf1.train.Saver()
            self.session = tf1.Session()
            self.session.run(tf1.global_variables_initializer())
            self.all_variables = tf1.global_variables()

    def train(self, inputs, labels):
        return [
            float(self.session.run([self._scale, self.train_op], self.feed(*batch))[0]) for batch in zip(inputs, labels)
        ]

    def feed(self, x, y):
        return {self._fed[0]: x, self._fed[1]: y}

    def values_sent(self, name, stats):
        """How many values of gradients an operator that has run has all-reduced."""
        try:
            op = self.graph.get_operation_by_name(name)
        except KeyError:  # made by TensorFlow from several
            return 0
        if not (is_transfer(op.type) and "fragment" in name):
            return 0
        shapes = [[dim.size for dim in output.tensor_description.shape.dim] for output in stats.output]
        return sum(int(np.prod(shape)) for shape in shapes)


class InLoop(SavedObjects):
    """A loop around a `tf.GradientTape` with a pipeline, in a `tf.function` or executed eagerly."""

    def __init__(self, chain, name="frozen_in_loop", is_eager=False, is_own_tape=False):
        self.variables = {key: tf.Variable(value, name=key) for key, value in start_values().items()}
        self.counted = Counted()
        self._manager = dynamic()
        self._is_own_tape = is_own_tape
        self.optimizer = tf.keras.optimizers.legacy.SGD(RATE, MOMENTUM)
        self._pipeline = stages.pipeline(
            name, self._manager, is_distributed=True, stages=made(chain), inner=self.optimizer
        )
        self._step = self._step_of if is_eager else tf.function(self._step_of, autograph=False)
        named = {key.replace("/", "_"): variable for key, variable in self.variables.items()}
        self.checkpoint = tf.train.Checkpoint(optimizer=self.optimizer, **named, **self._pipeline.state())

    def _step_of(self, x, y):
        step = self._pipeline.begin()
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(outputs_of(self.variables, x, self.counted) - y))
            loss = self._pipeline.scale(loss, step)
        variables = list(self.variables.values())
        if self._is_own_tape:
            grads = tape.gradient(loss, variables)
        else:
            grads = self._pipeline.gradients(step, tape, loss, variables)
        self._pipeline.combine(step, zip(grads, variables))
        self._pipeline.apply(step, self.optimizer.apply_gradients)
        return step.loss_scale

    def train(self, inputs, labels):
        return [float(self._step(tf.constant(x), tf.constant(y))) for x, y in zip(inputs, labels)]

    def everything(self):
        own = [*variables_of(self._pipeline.state()), *self.optimizer.variables()]
        return {**self.values(), **{re.sub(".*SGD/", "", variable.name): variable.numpy() for variable in own}}


class InFit(SavedModel):
    """Keras `fit` with `npu_keras_optimizer`."""

    def __init__(self, chain, generation=tf.keras.optimizers.legacy, is_counted=True, **settings):
        self.model = Layers(is_counted)
        self.variables, self.counted = self.model.named, self.model.counted
        self.optimizer = npu_keras_optimizer(generation.SGD(RATE, MOMENTUM), dynamic(), stages=made(chain))
        self.model.compile(self.optimizer, loss="mse", **settings)
        self.checkpoint = tf.train.Checkpoint(model=self.model, optimizer=self.optimizer)

    def train(self, inputs, labels):
        return self.fit(*[array.reshape(-1, WIDTH) for array in (inputs, labels)], batch_size=ROWS)


class Layers(tf.keras.Model):
    """The four layers."""

    def __init__(self, is_counted):
        super().__init__()
        self.named = {
            key: self.add_weight(key, value.shape, initializer=tf.keras.initializers.Constant(value))
            for key, value in start_values().items()
        }
        self.counted = Counted() if is_counted else None

    def call(self, inputs):
        return outputs_of(self.named, inputs, self.counted)


WAYS = {
    "graph": InGraph,
    "graph, tailed": functools.partial(InGraph, is_tailing=True),
    "function": InLoop,
    "function, own tape": functools.partial(InLoop, is_own_tape=True),
    "eager": functools.partial(InLoop, is_eager=True, name="frozen_eagerly"),
    "fit, legacy": InFit,
    "fit, current": functools.partial(InFit, generation=tf.keras.optimizers),
}
CHAINS_OF_WAYS = {
    "graph": tuple(CHAINS),
    "graph, tailed": ("all",),
    "function": ("all",),
    "function, own tape": ("clipped",),
    "eager": ("clipped",),
    "fit, legacy": ("all",),
    "fit, current": ("clipped",),
}
# Those that end the backward pass early.
STOPPING = ("function", "fit, legacy", "fit, current")


def trained(way, chain):
    """Variables, scales, updates, every variable, and how often the backward pass of each layer was computed."""
    training = WAYS[way](chain)
    scales = training.train(*batches_of(collective.current().rank))
    runs = training.counted.runs if hasattr(training, "counted") else None
    return training.values(), scales, training.updates(), runs


def assert_equals_numpy(way, chain, results):
    """Results of `trained`, by rank, against the model."""
    values, scales, groups = in_numpy(chain, len(results))
    assert set(groups) == {0, 1, 2} and len(groups) > len(SEQUENCE)
    for rank, (our_values, our_scales, our_updates, runs) in enumerate(results):
        where = f"{way}, {chain}, rank {rank}"
        assert our_scales == scales, where
        assert our_updates == len(groups), where
        for name, value in values.items():
            np.testing.assert_allclose(our_values[name], value, rtol=1e-4, atol=2e-5, err_msg=f"{where}: {name}")
            np.testing.assert_array_equal(our_values[name], results[0][0][name], err_msg=f"{where}: {name}")
        if runs is not None:
            assert runs == expected_runs(groups, scales, CHAINS[chain].get("window", 1), way in STOPPING), where


def executed(chain):
    """For each update: its group, what was computed, how many gradient values were sent, every variable after it."""
    training = InGraph(chain)
    options = tf1.RunOptions(trace_level=tf1.RunOptions.FULL_TRACE)
    found = []
    for x, y in zip(*batches_of(collective.current().rank, 6)):
        metadata = tf1.RunMetadata()
        training.session.run(training.train_op, training.feed(x, y), options, metadata)
        ran = {stats.node_name: stats for device in metadata.step_stats.dev_stats for stats in device.node_stats}
        sent = sum(training.values_sent(name, stats) for name, stats in ran.items())
        found.append((int(SEQUENCE[len(found)]), sorted(ran), sent, training.everything()))
    return found


def assert_frozen_layers_cost_nothing(results):
    """Results of `executed`, by rank."""
    for rank, of_rank in enumerate(results):
        before = None
        assert {group for group, *_ in of_rank} == {0, 1, 2}
        for group, names, sent, values in of_rank:
            backward = [name for name in names if name.startswith("gradients/")]
            for layer in range(LAYERS):
                of_layer = [name for name in backward if f"/layer_{layer}/" in name]
                updates = [name for name in names if re.search(rf"layer_{layer}/.*ApplyMomentum(_\d+)?$", name)]
                is_frozen = f"layer_{layer}" in FROZEN[group]
                assert bool(of_layer) != is_frozen, (rank, group, layer, of_layer)
                assert len(updates) == (0 if is_frozen else 2), (rank, group, layer, updates)
                of_values = [name for name in values if name.startswith(f"layer_{layer}/")]
                assert len(of_values) == 4  # two variables and their slots
                is_same = before and all(values[name].tobytes() == before[name].tobytes() for name in of_values)
                assert before is None or is_same == is_frozen, (rank, group, layer)
            of_layer = WIDTH * WIDTH + WIDTH
            assert sent == (0 if len(results) == 1 else (LAYERS - len(FROZEN[group])) * of_layer), (rank, group)
            before = values


def resumed(way, folder, chain="all", stop=9, steps=16):
    """Every variable after training in one go, and after a restart in the middle of a window."""
    rank = collective.current().rank
    inputs, labels = batches_of(rank, steps)
    whole, after = (WAYS[way](chain) for _ in range(2))
    whole.train(inputs[:stop], labels[:stop])
    after.restore(whole.save(f"{folder}/rank_{rank}"))
    for training in (whole, after):
        training.train(inputs[stop:], labels[stop:])
    return whole.everything(), after.everything()
