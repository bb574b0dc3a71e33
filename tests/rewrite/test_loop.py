"""Steps in a loop of the graph: the same bits as the same steps one by one, or a reason not to."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import optimizers
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


def test_slots_that_lie_flat_between_steps_are_a_reason_against_a_loop(graph):
    train_op = train_op_of(dense, optimizers.LAMB(0.01, fused=True))
    with pytest.raises(NotLoopableError, match="MutexLock.* keeps state in itself"):
        put_in_loop(graph, [train_op])


@pytest.mark.parametrize("name, use_resource", [("adam", True), ("adam", False), ("momentum", True), ("lamb", True)])
def test_an_overflow_in_the_loop_skips_that_step_alone(graph, name, use_resource):
    tf1.get_variable_scope().set_use_resource(use_resource)
    train_op = train_op_of(dense, loss_scaled(OPTIMIZERS[name]()), poisoned=(2, 5))
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


def _noise_of_every_kind():
    """Numbers of all kinds of generators; two of them have the same seeds."""
    ones = tf.ones([6])
    kinds = (
        lambda: tf.nn.dropout(ones, rate=0.5, seed=1),
        lambda: tf.nn.dropout(ones, rate=0.5, seed=1),
        lambda: tf.random.normal([6], seed=2),
        lambda: tf.random.truncated_normal([6], 1.0, tf.reduce_sum(ones), seed=3),
        lambda: tf.random.shuffle(tf.range(6.0), seed=4),
        lambda: tf.cast(tf.random.categorical(tf.ones([1, 4]), 6, seed=5)[0], tf.float32),
        lambda: tf.random.uniform([tf.random.uniform([], 1, 7, tf.int32, seed=6)], seed=7)[0],
        lambda: tf.random.gamma([6], 2.0, seed=8),
    )
    total = tf.zeros([6])  # TensorFlow adds up all of it at once, in the order of names
    for kind in kinds:
        with tf.name_scope("noise"):
            total += kind()
    return total


def test_seeded_numbers_go_on_from_single_steps_to_loops_and_back(graph):
    total = tf1.get_variable("total", [6], initializer=tf1.zeros_initializer(), use_resource=True)
    step = total.assign(0.5 * total + _noise_of_every_kind()).op
    loop = put_in_loop(graph, [step])
    with tf1.Session() as session:
        session.run(total.initializer)
        expected = []
        for _ in range(12):
            session.run(step)
            expected.append(session.run(total))
    with tf1.Session() as session:
        session.run(total.initializer)
        done = 0
        for loops, singles in ((3, 0), (0, 2), (2, 1), (4, 0)):
            session.run(loop.op, {loop.count: loops})
            for _ in range(singles):
                session.run(step)
            done += loops + singles
            np.testing.assert_array_equal(session.run(total), expected[done - 1])
        assert done == 12


def test_the_kernels_that_a_loop_shares_have_the_names_it_tells(graph):
    total = tf1.get_variable("total", [6], initializer=tf1.zeros_initializer(), use_resource=True)
    loop = put_in_loop(graph, [total.assign_add(_noise_of_every_kind()).op])
    drawing = {op.name for op in graph.get_operations() if "seed2" in op.node_def.attr and "iteration" not in op.name}
    assert set(loop.shared) == drawing and len(drawing) == 9
    metadata = tf1.RunMetadata()
    with tf1.Session() as session:
        session.run(total.initializer)
        session.run(loop.op, {loop.count: 0}, tf1.RunOptions(output_partition_graphs=True), metadata)
    assert drawing <= {node.name for prepared in metadata.partition_graphs for node in prepared.node}


def test_a_second_loop_of_a_step_with_seeded_numbers(graph):
    """As for runs that are fed differently: both draw from the same kernels."""
    total = tf1.get_variable("total", [4], initializer=tf1.zeros_initializer(), use_resource=True)
    step = total.assign_add(
        tf.nn.dropout(tf1.placeholder_with_default(tf.ones([4]), [4], name="fed"), rate=0.5, seed=1)
    )
    first, second = put_in_loop(graph, [step.op]), put_in_loop(graph, [step.op], ["fed:0"])
    with tf1.Session() as session:
        session.run(total.initializer)
        for _ in range(8):
            session.run(step)
        expected = session.run(total)
    with tf1.Session() as session:
        session.run(total.initializer)
        session.run(first.op, {first.count: 5})
        session.run(second.op, {second.count: 3, "fed:0": np.ones(4)})
        np.testing.assert_array_equal(session.run(total), expected)


def _with_noise_without_a_scope():
    noise = tf.raw_ops.RandomUniform(shape=[2], dtype=tf.float32, seed=1, seed2=2)
    return tf1.assign_add(tf1.get_variable("a", [2]), noise).op


def _with_a_loop():
    total = tf.compat.v1.while_loop(lambda i: i < 3.0, lambda i: i + 1.0, [tf1.get_variable("b", initializer=0.0)])
    return total.op


def _with_python():
    return tf1.py_func(lambda: np.float32(1), [], tf.float32).op


@pytest.mark.parametrize(
    "build, reason, is_only_random",
    [
        (_with_noise_without_a_scope, "keeps state", True),
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
