"""Steps in a loop of the graph: the same bits as the same steps one by one, or a reason not to."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
from npu_bridge.rewrite import NotLoopableError, put_in_loop
from tests.rewrite.looping import MODELS, Fresh, batches, dense, loss_scaled, train_op_of, values_one_by_one_and_in
from tests.training import OPTIMIZERS, assert_same_bits

tf1 = tf.compat.v1
STEPS = 7
pytestmark = pytest.mark.filterwarnings("ignore:`tf.layers")


def one_by_one_and_looped(train_op, steps=STEPS):
    return values_one_by_one_and_in(put_in_loop(train_op.graph, [train_op]), train_op, steps)


@pytest.mark.parametrize("use_resource", [True, False], ids=["resource", "reference"])
@pytest.mark.parametrize("model", MODELS)
def test_a_loop_gives_the_bits_of_its_steps(graph, model, use_resource):
    tf1.get_variable_scope().set_use_resource(use_resource)
    one_by_one, looped = one_by_one_and_looped(train_op_of(MODELS[model], loss_scaled(OPTIMIZERS["adam"]())))
    assert one_by_one["global_step:0"] == STEPS
    assert_same_bits(looped, one_by_one)


@pytest.mark.parametrize("name", ["sgd", "momentum", "lamb", "keras_legacy_adam"])
def test_every_family_of_optimizers(graph, name):
    optimizer = NPUOptimizer(OPTIMIZERS[name]()) if "keras" in name else OPTIMIZERS[name]()
    one_by_one, looped = one_by_one_and_looped(train_op_of(dense, loss_scaled(optimizer)))
    assert_same_bits(looped, one_by_one)


def test_an_overflow_in_the_loop_skips_that_step_alone(graph):
    train_op = train_op_of(dense, loss_scaled(OPTIMIZERS["adam"]()), poisoned=(2, 5))
    one_by_one, looped = one_by_one_and_looped(train_op)
    assert one_by_one["global_step:0"] == STEPS - 2
    assert_same_bits(looped, one_by_one)


def test_data_that_ends_in_the_loop_keeps_what_was_trained(graph):
    train_op = train_op_of(dense, OPTIMIZERS["momentum"]())
    loop, fresh = put_in_loop(graph, [train_op]), Fresh()
    with fresh.session as session:
        with pytest.raises(tf.errors.OutOfRangeError):
            session.run(loop.op, {loop.count: 100})
        looped = fresh.values()
        fresh.restart()
        for _ in range(12):
            session.run(train_op)
        assert_same_bits(looped, fresh.values())


def test_zero_steps_train_nothing(graph):
    loop, fresh = put_in_loop(graph, [train_op_of(dense, OPTIMIZERS["momentum"]())]), Fresh()
    with fresh.session as session:
        before = fresh.values()
        session.run(loop.op, {loop.count: 0})
        assert_same_bits(fresh.values(), before)


def test_a_fed_value_is_the_same_in_every_step(graph):
    """Also one that would be computed anew in each step if it were not fed."""
    batch = tf1.placeholder_with_default(batches(), [4, 8, 8, 2])
    pulled = tf1.get_variable("pulled", initializer=0.0)
    count = pulled.assign_add(tf.reduce_sum(batch))
    loop, fresh = put_in_loop(graph, [count.op], [batch.name]), Fresh()
    with fresh.session as session:
        session.run(loop.op, {loop.count: 40, batch: np.full([4, 8, 8, 2], 1 / 512, "f")})  # there are 12 batches
        assert session.run(pulled) == 40


def test_feeding_one_result_of_an_operator_leaves_the_others(graph):
    sums = tf.unstack(tf.reduce_sum(batches(), axis=[1, 2, 3]))
    pulled = tf1.get_variable("pulled", initializer=[0.0, 0.0])
    loop, fresh = put_in_loop(graph, [pulled.assign_add(sums[:2]).op], [sums[0].name]), Fresh()
    with fresh.session as session:
        expected = sum(session.run(sums[1]) for _ in range(5))
        fresh.restart()
        session.run(loop.op, {loop.count: 5, sums[0]: 7.0})
        np.testing.assert_allclose(session.run(pulled), [35.0, expected], rtol=1e-5)


def _with_dropout(seed=1):
    return tf1.assign_add(tf1.get_variable("a", [2]), tf.nn.dropout(tf.ones([2]), rate=0.5, seed=seed)).op


def test_random_numbers_without_a_seed_are_new_in_every_step(graph):
    """There is no stream of numbers that steps one by one would have had."""
    seen = tf1.get_variable("seen", [20], initializer=tf1.zeros_initializer(), use_resource=True)
    count = tf1.get_variable("count", initializer=0, use_resource=True)
    drawn = tf.random.uniform([])
    step = tf1.scatter_update(seen, count.assign_add(1) - 1, drawn)
    loop, fresh = put_in_loop(graph, [step.op]), Fresh()
    with fresh.session as session:
        session.run(loop.op, {loop.count: 19})
        session.run(step)
        assert len(set(session.run(seen))) == 20


def _with_a_loop():
    total = tf.compat.v1.while_loop(lambda i: i < 3.0, lambda i: i + 1.0, [tf1.get_variable("b", initializer=0.0)])
    return total.op


def _with_python():
    return tf1.py_func(lambda: np.float32(1), [], tf.float32).op


@pytest.mark.parametrize(
    "build, reason, is_only_random",
    [
        (_with_dropout, "keeps state", True),
        (_with_a_loop, "loop of its own", False),
        (_with_python, "keeps state", False),
    ],
)
def test_a_step_that_a_copy_would_not_equal_is_left_alone(graph, build, reason, is_only_random):
    was_on = tf1.control_flow_v2_enabled()
    tf1.disable_control_flow_v2()
    try:
        step = build()
    finally:
        if was_on:
            tf1.enable_control_flow_v2()
    before = graph.version
    with pytest.raises(NotLoopableError, match=reason) as raised:
        put_in_loop(graph, [step])
    assert raised.value.is_only_random == is_only_random
    assert graph.version == before
