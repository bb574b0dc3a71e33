"""Accumulation in its other forms, with gradients that are fed, and what numpy makes of them."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.amp.loss_scale import DynamicLossScaleManager
from npu_bridge.estimator.npu.npu_helpers import npu_keras_optimizer
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
from npu_bridge.stages import Accumulate, ClipByGlobalNorm
from tests.saved_trainings import SavedSession
from tests.several_losses import POISONS, RATE, SHAPES, fed_to, losses_of, start_values

tf1 = tf.compat.v1
WINDOW, GROWS_EVERY, FIRST_SCALE, STEPS = 3, 2, 2.0**10, 32
CLIP_NORM = 3.0  # above the norm of most means, below that of sums
FORMS = {
    "boost": lambda: Accumulate(WINDOW, exchange="batch"),
    "boost, sums": lambda: Accumulate(WINDOW, "sum", exchange="batch"),
    "apex": lambda: Accumulate(WINDOW, "sum", loss_scale="batch"),
}


def fed_twice(rank):
    """The first loss of `several_losses`, twice, the second time without anything that overflows."""
    fed = fed_to(rank)
    return fed + [
        {key: np.where(np.isfinite(each), each, 1).astype(each.dtype) for key, each in of.items()} for of in fed
    ]


def in_numpy(form, ranks):
    """The variables after each step, the scale that it used, and the number of updates so far."""
    values = {name: value.astype(np.float64) for name, value in start_values().items()}
    zeros = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    sums, counted, is_bad_window, updates = dict(zeros), 0, False, 0
    scale, good, trace = FIRST_SCALE, 0, []
    fed = [fed_twice(rank) for rank in range(ranks)]
    for step in range(STEPS):
        used, is_bad = scale, any((0, rank, step) in POISONS for rank in range(ranks))
        good = 0 if is_bad else good + 1
        scale = scale / 2 if is_bad else scale * 2 if good == GROWS_EVERY else scale
        good = 0 if good == GROWS_EVERY else good
        is_counted = form == "apex" or not is_bad
        is_bad_window = is_bad_window or is_bad
        if is_counted:
            counted += 1
            for grads in (fed[rank][step] for rank in range(ranks)):
                table = np.zeros(SHAPES["table"])
                np.add.at(table, grads["rows_0"], grads["table_0"])
                of_name = {"kernel": grads["kernel_0"].astype(np.float64), "vector": grads["vector_0"], "table": table}
                sums = {name: sums[name] + of_name[name] / ranks for name in sums}
        if counted == WINDOW:
            if form != "apex" or not is_bad_window:
                divisor = WINDOW if form == "boost" else 1
                norm = np.sqrt(sum(np.sum(np.square(grad / divisor)) for grad in sums.values()))
                factor = min(1.0, CLIP_NORM / norm) / divisor
                values = {name: value - RATE * factor * sums[name] for name, value in values.items()}
                updates += 1
            sums, counted, is_bad_window = dict(zeros), 0, False
        trace.append((values, used, updates))
    return trace


class InGraph(SavedSession):
    """A TF 1 graph with `NPUOptimizer`."""

    def __init__(self, form, is_tailing=False):
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.variables = {
                name: tf1.get_variable(name, initializer=value, use_resource=name != "vector")
                for name, value in start_values().items()
            }
            self._fed = {key: tf1.placeholder(value.dtype, value.shape) for key, value in fed_to(0)[0].items()}
            manager = DynamicLossScaleManager(FIRST_SCALE, growth_interval=GROWS_EVERY)
            inner = tf1.train.GradientDescentOptimizer(RATE)
            added = [ClipByGlobalNorm(CLIP_NORM), FORMS[form]()]
            optimizer = NPUOptimizer(inner, manager, True, True, is_tailing, name="forms", stages=added)
            self.count = tf1.train.get_or_create_global_step()
            self._train_op = optimizer.minimize(losses_of(self.variables, self._fed)[0], self.count)
            self._scale = optimizer.last_step.loss_scale
            self.saver = tf1.train.Saver()
            self.session = tf1.Session()
            self.session.run(tf1.global_variables_initializer())
            self.all_variables = tf1.global_variables()

    def train(self, fed):
        trace = []
        for grads in fed:
            feeds = {self._fed[key]: value for key, value in grads.items()}
            scale, _ = self.session.run([self._scale, self._train_op], feeds)
            trace.append((self.session.run(self.variables), scale, int(self.session.run(self.count))))
        return trace


class InFunction:
    """A `tf.function` around `minimize` of a Keras optimizer."""

    def __init__(self, form):
        self._variables = {name: tf.Variable(value, name=name) for name, value in start_values().items()}
        self._manager = DynamicLossScaleManager(FIRST_SCALE, growth_interval=GROWS_EVERY)
        added = [FORMS[form](), ClipByGlobalNorm(CLIP_NORM)]
        self._optimizer = npu_keras_optimizer(tf.keras.optimizers.SGD(RATE), self._manager, stages=added)

        @tf.function(autograph=False)
        def step(grads):
            self._optimizer.minimize(lambda: losses_of(self._variables, grads)[0], list(self._variables.values()))

        self._step = step

    def train(self, fed):
        trace = []
        for grads in fed:
            scale = float(self._optimizer.loss_scale)
            self._step({key: tf.constant(value) for key, value in grads.items()})
            values = {name: variable.numpy() for name, variable in self._variables.items()}
            trace.append((values, scale, int(self._optimizer.iterations)))
        return trace


WAYS = {"graph": InGraph, "graph, tailed": lambda form: InGraph(form, True), "function": InFunction}


def trained(ways):
    """On a rank: the trace of each form in each of these ways."""
    rank = collective.current().rank
    return {(way, form): WAYS[way](form).train(fed_twice(rank)) for way in ways for form in FORMS}


def assert_equals_numpy(form, traces):
    """Traces of one form, by rank, against the model."""
    expected = in_numpy(form, len(traces))
    for rank, trace in enumerate(traces):
        for step, ((values, scale, updates), (model, model_scale, model_updates)) in enumerate(zip(trace, expected)):
            where = f"{form}, rank {rank}, step {step}"
            assert (scale, updates) == (model_scale, model_updates), where
            for name, value in values.items():
                np.testing.assert_allclose(value, model[name], rtol=2e-5, atol=2e-5, err_msg=f"{where}: {name}")
                assert value.tobytes() == traces[0][step][0][name].tobytes(), f"{where}: {name} differs between ranks"
