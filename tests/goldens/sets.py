"""Small trainings in TF 1 graphs with many sets of stages, made once in a process, each run of them in a session."""

from __future__ import annotations

import functools

import numpy as np
import tensorflow as tf

from npu_bridge import collective, optimizers, stages
from npu_bridge.estimator.npu.npu_loss_scale_manager import (
    ExponentialUpdateLossScaleManager,
    FixedLossScaleManager,
)
from npu_bridge.estimator.npu.npu_optimizer import NPUDistributedOptimizer, NPUOptimizer
from npu_bridge.estimator.npu.npu_saver import NPUSaver
from npu_bridge.gradients.checkpoints.kept_state import OF_RANKS, describe_stage_state
from npu_bridge.gradients.collections import pipelines_in
from tests.goldens.two_layers import as_built

tf1 = tf.compat.v1
SHAPES = {"a": (4, 3), "b": (6,), "c": (2, 2), "d": (5,), "e": (3,)}
_HALF = {"groups": [["^a", "^b"], ["^c", "^d", "^e"]], "kind": "explicit", "sequence": [0, 1, 1]}


def _momentum():
    return tf1.train.MomentumOptimizer(0.05, 0.9)


def _with(*added, inner=_momentum, manager=None):
    if manager is not None:
        return lambda name: NPUOptimizer(inner(), manager(), True, True, name=name, stages=[make() for make in added])
    return lambda name: NPUDistributedOptimizer(inner(), name=name, stages=[make() for make in added])


def _window():
    return stages.Accumulate(3)


def _top_k():
    return stages.TopK(0.2)


def _dynamic():
    return ExponentialUpdateLossScaleManager(64.0, 2, 1, 2, 0.5)


SETS = {
    "plain": _with(),
    "window": _with(_window),
    "window of reduced": _with(lambda: stages.Accumulate(3, exchange="batch")),
    "freeze": _with(lambda: stages.Freeze(_HALF)),
    "top k": _with(_top_k),
    "threshold": _with(lambda: stages.Threshold(0.5)),
    "partial sync": _with(lambda: stages.PartialSync(6)),
    "adasum of weights": _with(lambda: stages.Adasum(on="weights")),
    "adasum": _with(stages.Adasum),
    "clipping": _with(lambda: stages.ClipByGlobalNorm(0.5), lambda: stages.ClipLocally(1.0)),
    "dynamic scale": _with(manager=_dynamic),
    "static scale": _with(manager=lambda: FixedLossScaleManager(8.0)),
    "sharded": lambda name: NPUDistributedOptimizer(_momentum(), True, name=name),
    "sharded adam": lambda name: NPUDistributedOptimizer(tf1.train.AdamOptimizer(0.01), True, name=name),
    "adam": _with(inner=lambda: tf1.train.AdamOptimizer(0.01)),
    "fused LAMB": _with(inner=lambda: optimizers.tf1.LAMB(0.01, fused=True)),
    "window, top k, dynamic, adam": _with(
        _window, _top_k, inner=lambda: tf1.train.AdamOptimizer(0.01), manager=_dynamic
    ),
    "window, partial sync, adam": _with(
        _window, lambda: stages.PartialSync(6), inner=lambda: tf1.train.AdamOptimizer(0.01)
    ),
}


def own_kinds(chosen):
    """Returns parts of names of variables that differ between ranks, with a set of stages on several ranks."""
    kinds = []
    if "window" in chosen and "reduced" not in chosen:
        kinds.append("accumulated/")
    if "top k" in chosen or "threshold" in chosen:
        kinds.append("not_sent/")
    if "partial sync" in chosen:
        kinds += [f"{name}:" for name in SHAPES]
    if "partial sync" in chosen or chosen == "adasum of weights":
        kinds += ["/Momentum", "/Adam"]
    return kinds


@functools.cache
def training(chosen):
    """Returns the graph of a set of stages, made at the first call in this process."""
    return Training(chosen)


class Training:
    """A graph of five variables whose gradients depend on their values and on the feeds of each rank."""

    def __init__(self, chosen):
        self.graph = tf.Graph()
        with self.graph.as_default():
            random = np.random.RandomState(1)
            self.variables = {
                name: tf1.get_variable(name, initializer=random.randn(*shape).astype(np.float32), use_resource=True)
                for name, shape in SHAPES.items()
            }
            self._fed = tf1.placeholder(tf.float32, [len(SHAPES)])
            targets = [tf.sin(self._fed[number] * (1.0 + number)) for number in range(len(SHAPES))]
            losses = [
                tf.reduce_sum(tf.square(tf.tanh(variable) - target))
                for variable, target in zip(self.variables.values(), targets)
            ]
            self.optimizer = SETS[chosen](chosen.replace(" ", "_").replace(",", ""))
            step = tf1.train.get_or_create_global_step()
            self.train_op = self.optimizer.minimize(tf.add_n(losses), step)
            (pipeline, *_) = pipelines_in(self.graph)
            self._sync = stages.sync_all(self.optimizer) if pipeline.saved.rank_values else tf.no_op()
            taken = [
                op for op in (values.restore_from_own_rows() for values in pipeline.saved.rank_values) if op is not None
            ]
            self._settle = tf.group(*taken)
            self._saver = NPUSaver(max_to_keep=None)
            self._initializer = tf1.global_variables_initializer()
            kept = [variable for variable in tf1.global_variables() if OF_RANKS not in variable.name]
            # `value()` reads this rank's part, also of slots on other ranks.
            self._values = {variable.name: variable.value() for variable in kept}
            self.graph.finalize()

    def session(self):
        """Returns a session with initial values."""
        session = tf1.Session(graph=self.graph, config=as_built())
        session.run(self._initializer)
        return session

    def train(self, session, first, last):
        """Trains from one step to another, with batches of this rank."""
        rank = collective.current().rank
        for step in range(first, last):
            session.run(self.train_op, {self._fed: np.random.RandomState(100 * step + rank).randn(len(SHAPES))})

    def state(self, session):
        """Returns every value by its name, without those that other ranks keep."""
        return {name: value for name, value in session.run(self._values).items() if np.size(value)}

    def settle(self, session):
        """Gives ranks their rows, if any."""
        session.run(self._settle)

    def save(self, session, path):
        """Saves; called on all ranks. The file of rank 0 is at that path."""
        session.run(self._sync)
        rank = collective.current().rank
        self._saver.save(session, f"{path}_of_rank_{rank}" if rank else path, write_meta_graph=False)
        collective.current().exchange_integers([0], "saved")

    def restore(self, session, path):
        self._saver.restore(session, path)


def assert_settled(restored, saved, chosen, where):
    """Compares the states of all ranks after a restore with those saved by other stages or another number of ranks.

    Args:
      restored, saved: by rank, values by name.
      chosen: the stages that restored.
    """
    own = own_kinds(chosen) if len(restored) > 1 else []
    of_savers = {name for state in saved for name in state}
    together = {name: [state[name] for state in saved if name in state] for name in of_savers}
    checked = 0
    for name in sorted({name for state in restored for name in state} & of_savers):
        values = [state[name] for state in restored if name in state]
        expected = together[name]
        if len(values) == len(expected) == len(restored) and any(part in name for part in own):
            ok = all(np.array_equal(*pair) for pair in zip(values, expected))
        elif all(np.array_equal(value, expected[0]) for value in expected):
            ok = all(np.array_equal(value, expected[0]) for value in values)
        else:
            mean = np.mean(np.array(expected, np.float64), axis=0)
            same = all(np.array_equal(value, values[0]) for value in values)
            ok = same and np.allclose(values[0], mean, rtol=1e-6, atol=1e-7)
        assert ok, f"{where}: {name} is {values}; saved as {expected}"
        checked += 1
    assert checked > len(SHAPES), where


def kinds_of(state):
    """Returns the words of messages for the state of stages in it."""
    return {describe_stage_state(name.partition(":")[0]) for name in state} - {None}
