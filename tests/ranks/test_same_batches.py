"""Rank 0 says when all ranks have read the same first batch, and only then; no batch is lost for it."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.estimator.npu.npu_helpers import npu_callbacks_append
from npu_bridge.estimator.npu.npu_optimizer import KerasDistributeOptimizer, NPUDistributedOptimizer
from tests.goldens.two_layers import in_graph
from tests.once import lines_said
from tests.ranks.ways import started_session

tf1 = tf.compat.v1
pytestmark = pytest.mark.ranks(2)
_ROWS = np.arange(12, dtype=np.float32).reshape(6, 2)


def _about_batches(lines):
    return [line for line in lines if "first batch" in line]


def _dataset(name):
    """Returns a rank's input: three batches, the "same" or "sharded" ones of the rows above, or only a constant."""
    ranks = collective.current()
    if name == "constant":
        return tf.data.Dataset.from_tensors((np.zeros([2], np.float32), np.float32(1))).repeat(6).batch(2)
    rows = tf.data.Dataset.from_tensor_slices((_ROWS, np.arange(6.0, dtype=np.float32)))
    return rows.batch(2) if name == "same" else rows.shard(ranks.size, ranks.rank).batch(1)


def _losses_of(read, labels):
    weight = tf1.get_variable("weight", [2, 1], initializer=tf1.zeros_initializer())
    loss = tf.reduce_mean(tf.square(tf.matmul(read, weight)[:, 0] - labels))
    train_op = NPUDistributedOptimizer(tf1.train.GradientDescentOptimizer(0.0)).minimize(loss)
    return loss, train_op


def _said_in_a_session(read, labels, runs, feeds=None):
    """On a rank: all losses, which show all batches, and what was said."""
    loss, train_op = _losses_of(read, labels)
    with lines_said() as lines, started_session() as session:
        return [float(session.run([loss, train_op], feeds)[0]) for _ in range(runs)], _about_batches(lines)


@in_graph
def _in_a_session(name):
    return _said_in_a_session(*tf1.data.make_one_shot_iterator(_dataset(name)).get_next(), 3)


@in_graph
def _fed(rows):
    read, labels = tf1.placeholder(tf.float32, [None, 2]), tf1.placeholder(tf.float32, [])
    return _said_in_a_session(read, labels, 1, {read: rows, labels: 0.5})[1]


@in_graph
def _read_on_rank_0_alone():
    fed = tf.ones([2, 2]), tf.zeros([2])
    if collective.current().rank == 0:
        fed = tf1.data.make_one_shot_iterator(_dataset("same")).get_next()
    return _said_in_a_session(*fed, 1)[1]


def _fit(name):
    """On a rank: the mean loss of an epoch, which shows all batches, what was said, and how often steps were traced."""
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, kernel_initializer="zeros", input_shape=(2,))])
    model.compile(KerasDistributeOptimizer(tf.keras.optimizers.SGD(0.0)), "mse")
    dataset = _dataset(name)
    with lines_said() as lines:
        done = model.fit(dataset, epochs=2, verbose=0, callbacks=npu_callbacks_append())
    return done.history["loss"], _about_batches(lines), model.train_tf_function.experimental_get_tracing_count()


def _all():
    names = ("same", "sharded", "constant")
    rank = collective.current().rank
    return (
        {name: _in_a_session(name) for name in names},
        {name: _fit(name) for name in names[:2]},
        [_fed(_ROWS), _fed(_ROWS + rank), _read_on_rank_0_alone()],
    )


def test_equal_first_batches_are_said_once_by_rank_0_and_no_batch_is_lost(on_ranks):
    answers = on_ranks(2, _all)
    for rank, (in_sessions, in_fits, others) in enumerate(answers):
        for name, is_said in (("same", True), ("sharded", False), ("constant", False)):
            losses, lines = in_sessions[name]
            assert len(lines) == (is_said and rank == 0), f"{name} on rank {rank}"
            numbers = np.arange(6.0) ** 2
            if name == "same":
                np.testing.assert_array_equal(losses, numbers.reshape(3, 2).mean(axis=1))
            elif name == "sharded":
                np.testing.assert_array_equal(losses, numbers[rank::2])
            if name in in_fits:
                of_fit, lines, traces = in_fits[name]
                assert len(lines) == (is_said and rank == 0), f"{name} in fit on rank {rank}"
                np.testing.assert_allclose(of_fit, [numbers.mean()] * 2, rtol=1e-6)  # of both ranks, averaged
                assert traces == 1
        assert [len(lines) for lines in others] == [rank == 0, 0, 0]
    line = answers[0][2][0][0]
    assert "all 2 ranks have read the same first batch" in line
    assert "dataset.shard(get_rank_size(), get_rank_id())" in line
