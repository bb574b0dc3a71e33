"""Ranks send gradients, and whatever a script sends, in every iteration of a loop."""

from __future__ import annotations

import contextlib
import functools

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.collective import current
from npu_bridge.estimator.npu.npu_optimizer import NPUDistributedOptimizer
from npu_bridge.graph.control_flow import classic_control_flow
from npu_bridge.hccl import hccl_ops
from tests.gradients.test_gradients_of_bodies import BODIES, train

tf1 = tf.compat.v1
BATCHES = [[[1.0, 2.0], [2.0, 1.0]], [[4.0, 1.0], [8.0, 3.0]], [[0.5, 3.0], [1.5, 2.0]]]


def train_here(name, place):
    """On a rank: the weights after each step on this rank's batches; the place by its name."""
    (found,) = (one for one in BODIES if one.__name__ == place)
    return train(name, found, [batches[current().rank] for batches in BATCHES])


@pytest.mark.slow("trains in every body; the cases below have the sums")
def test_the_mean_is_trained_on(on_ranks):
    for place in BODIES:
        expected, _ = train("stock", place, np.mean(BATCHES, axis=1).tolist())
        for name in ("distributed", "all", "tailed"):
            for trained, steps in on_ranks(2, train_here, name, place.__name__):
                np.testing.assert_array_equal(trained, expected)
                assert steps == 3


def sum_in_turn(is_classic):
    """On a rank: sums over the ranks of numbers that do not wait for one another, in a TF 1 graph."""
    with tf.Graph().as_default(), classic_control_flow() if is_classic else contextlib.nullcontext():

        def body(i, sums):
            return i + 1, sums.write(i, hccl_ops.allreduce(tf.cast([i], tf.float32), "sum"))

        array = tf1.TensorArray(tf.float32, 40)
        _, sums = tf1.while_loop(lambda i, sums: i < 40, body, [tf.constant(0), array])
        with tf1.Session() as session:
            return session.run(sums.concat())


@pytest.mark.parametrize("is_classic", [True, False])
def test_a_sum_in_a_loop_is_sent_in_each_iteration(on_ranks, is_classic):
    for sums in on_ranks(2, sum_in_turn, is_classic):
        np.testing.assert_array_equal(sums, np.arange(40) * 2)


@tf.function
def sum_in_a_function():
    sums = tf.TensorArray(tf.float32, 40)
    for i in tf.range(40):
        sums = sums.write(i, hccl_ops.allreduce(tf.cast(tf.reshape(i, [1]), tf.float32), "sum"))
    return sums.concat()


def accumulate_in_a_function():
    """On a rank: the sums of the loop above, and weights after a step on gradients added up in a loop."""
    weights, numbers = tf.Variable([1.0, 2.0]), tf.constant(BATCHES)[:, current().rank]
    optimizer = NPUDistributedOptimizer(tf1.train.GradientDescentOptimizer(0.125))

    def loss(values):
        return tf.reduce_sum(weights * values)

    @tf.function
    def step():
        total = tf.zeros([2])
        for values in numbers:
            ((gradient, _),) = optimizer.compute_gradients(functools.partial(loss, values), [weights])
            total += gradient
        optimizer.apply_gradients([(total, weights)])

    step()
    return sum_in_a_function().numpy(), weights.numpy()


def test_so_it_is_in_a_loop_of_a_function(on_ranks):
    expected = [1.0, 2.0] - 0.125 * np.sum(np.mean(BATCHES, axis=1), axis=0)
    for sums, weights in on_ranks(2, accumulate_in_a_function):
        np.testing.assert_array_equal(sums, np.arange(40) * 2)
        np.testing.assert_array_equal(weights, expected)
