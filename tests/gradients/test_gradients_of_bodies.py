"""Gradients that are computed in a `tf.while_loop` or a branch of `tf.cond`, and applied outside of it."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.estimator.npu.npu_loss_scale_manager import ExponentialUpdateLossScaleManager, FixedLossScaleManager
from npu_bridge.estimator.npu.npu_loss_scale_optimizer import NPULossScaleOptimizer
from npu_bridge.estimator.npu.npu_optimizer import NPUDistributedOptimizer, NPUOptimizer
from npu_bridge.graph.control_flow import classic_control_flow

tf1 = tf.compat.v1


def in_a_loop(compute, given):
    def body(i, total):
        return i + 1, total + compute(given * tf.cast(i + 1, tf.float32))

    return tf1.while_loop(lambda i, total: i < 3, body, [tf.constant(0), tf.zeros([2])])[1]


def in_one_branch(compute, given):
    return tf1.cond(given[0] > 0, lambda: compute(given), lambda: tf.zeros([2]))


def in_both_branches(compute, given):
    return tf1.cond(given[0] > 2, lambda: compute(given), lambda: compute(given * 2))


def in_each_row(compute, given):
    return tf.reduce_sum(tf1.map_fn(compute, tf.stack([given, given * 2])), axis=0)


BODIES = [in_a_loop, in_one_branch, in_both_branches, in_each_row]
OPTIMIZERS = {
    "stock": lambda opt: opt,
    "scaled": lambda opt: NPUOptimizer(opt, ExponentialUpdateLossScaleManager(8, 2), is_loss_scale=True),
    "scaled alone": lambda opt: NPULossScaleOptimizer(opt, FixedLossScaleManager(8)),
    "distributed": NPUDistributedOptimizer,
    "all": lambda opt: NPUOptimizer(opt, FixedLossScaleManager(8), True, True),
    "tailed": lambda opt: NPUOptimizer(opt, FixedLossScaleManager(8), True, True, is_tailing_optimization=True),
}


def train(name, place, batches):
    """The weights after each step, and the steps counted."""
    with tf.Graph().as_default(), classic_control_flow():
        given = tf1.placeholder(tf.float32, [2])
        weights = tf1.get_variable("weights", initializer=[1.0, 2.0], use_resource=True)
        optimizer = OPTIMIZERS[name](tf1.train.MomentumOptimizer(0.125, 0.5))

        def compute(values):
            ((gradient, _),) = optimizer.compute_gradients(tf.reduce_sum(weights * values))
            return gradient

        step = tf1.train.get_or_create_global_step()
        update = optimizer.apply_gradients([(place(compute, given), weights)], global_step=step)
        found = []
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            for batch in batches:
                session.run(update, {given: batch})
                found.append(session.run(weights))
            return found, session.run(step)


@pytest.mark.few_fast("each", "not every pair")
@pytest.mark.parametrize("place", BODIES)
@pytest.mark.parametrize("name", list(OPTIMIZERS)[1:])
def test_they_train_as_with_the_optimizer_alone(name, place):
    batches = [[1.0, 2.0], [4.0, 1.0], [0.5, 3.0]]
    trained, steps = train(name, place, batches)
    expected, _ = train("stock", place, batches)
    np.testing.assert_array_equal(trained, expected)
    assert steps == 3
    assert not np.array_equal(trained[0], [1.0, 2.0])


@pytest.mark.parametrize("place", BODIES)
def test_a_step_that_overflows_is_skipped(place):
    trained, steps = train("scaled", place, [[1.0, 2.0], [np.inf, 2.0], [1.0, 2.0]])
    expected, _ = train("stock", place, [[1.0, 2.0], [1.0, 2.0]])
    np.testing.assert_array_equal(trained, [expected[0], expected[0], expected[1]])
    assert steps == 2
