"""A rank that the others wait for is named, wherever it loses its time; equal ranks and short disturbances are not."""

from __future__ import annotations

import io
import time

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.estimator.npu.npu_config import NPURunConfig
from npu_bridge.estimator.npu.npu_estimator import NPUEstimator, NPUEstimatorSpec
from npu_bridge.estimator.npu.npu_optimizer import NPUDistributedOptimizer
from npu_bridge.gradients.reduction_moments import mark_reductions
from npu_bridge.graph.run import run_of
from npu_bridge.reporting import History, HistoryHook, ProgressHook, StragglerHook
from npu_bridge.session import name_step, train_in_loops
from npu_bridge.stages import Accumulate
from tests.training import in_graph

tf1 = tf.compat.v1
pytestmark = pytest.mark.ranks(3)
_RANKS, _SLOW = 3, 1
# A step that counts; what a rank that is slow needs more; both far above what a machine in use adds.
_PAUSE_SECS, _MORE_SECS = 0.01, 0.03
_STEPS = 54  # 3 to start up, one to begin with, 50 to compare


def _slow_always(step):
    return True


def _slow_for_30(step):
    return 10 <= step < 40


def _slow_at_first(step):
    return step < _STEPS


def _never(step):
    return False


def _batches(is_slow):
    """A batch after another, of which those of one rank take their time in some steps."""
    mine = collective.current().rank == _SLOW

    def batches():
        for step in range(1000):
            time.sleep(_PAUSE_SECS + (_MORE_SECS if mine and is_slow(step) else 0.0))
            yield np.full([4, 8], (step % 7 + 1) / 8, np.float32)

    return tf.data.Dataset.from_generator(batches, output_signature=tf.TensorSpec([4, 8], tf.float32))


def _step(features, optimizer=None):
    weights = [tf1.get_variable(f"weight_{n}", [8, 8], initializer=tf1.ones_initializer()) for n in range(3)]
    for weight in weights:
        features = tf.tanh(tf.matmul(features, weight))
    optimizer = optimizer or NPUDistributedOptimizer(tf1.train.MomentumOptimizer(0.1, 0.9))
    return optimizer.minimize(tf.reduce_mean(features), tf1.train.get_or_create_global_step())


def _train(train_op, runs, hooks=()):
    """What the ranks say, and the weights in the end."""
    said = io.StringIO()
    with tf1.train.MonitoredTrainingSession(hooks=[StragglerHook(said), *hooks]) as session:
        for _ in range(runs):
            session.run(train_op)
        weights = session.run(tf1.trainable_variables())
    return said.getvalue().splitlines(), weights


@in_graph
def _sleeping(is_slow, runs, folder):
    features = tf1.data.make_one_shot_iterator(_batches(is_slow)).get_next()
    shown = io.StringIO()
    hooks = [ProgressHook(stream=shown, every_n_steps=1000), HistoryHook(f"{folder}/history.jsonl")]
    said, _ = _train(_step(features), runs, hooks)
    return said, shown.getvalue().splitlines()


def test_a_rank_that_sleeps_in_its_input_is_named(on_ranks, tmp_path):
    (said, shown), *others = on_ranks(_RANKS, _sleeping, _slow_always, _STEPS + 50, str(tmp_path))
    assert others == [([], [])] * 2
    (line,) = said
    assert line.startswith(f"npu_bridge: rank {_SLOW} is slow: its own work takes ")
    assert line.endswith(" of the time for it") and "those of the others" in line
    assert f" | rank {_SLOW} slow, others wait " in shown[-1]
    first, last = History(str(tmp_path / "history.jsonl")).comparisons
    for found in (first, last):
        assert found.slow == [_SLOW]
        assert found.own_ms[_SLOW] >= 1000 * (_PAUSE_SECS + _MORE_SECS) > 2 * max(found.own_ms[0], found.own_ms[2])
        assert found.waiting[_SLOW] < min(found.waiting[0], found.waiting[2])
    assert (first.step, last.step) == (_STEPS, _STEPS + 50)
