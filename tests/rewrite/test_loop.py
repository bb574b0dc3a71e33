"""Steps in a loop of the graph: the same bits as the same steps one by one, or a reason not to."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.estimator.npu.npu_loss_scale_manager import ExponentialUpdateLossScaleManager
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
from npu_bridge.rewrite import NotLoopableError, put_in_loop
from tests.training import OPTIMIZERS, assert_same_bits

tf1 = tf.compat.v1
STEPS = 7
pytestmark = pytest.mark.filterwarnings("ignore:`tf.layers")


def batches(poisoned=()):
    """An iterator's next batch of images; every number of a poisoned batch is infinite."""
    images = np.random.RandomState(0).randn(12, 4, 8, 8, 2).astype("f")
    for number in poisoned:
        images[number] = np.inf
    iterator = tf1.data.make_initializable_iterator(tf.data.Dataset.from_tensor_slices(images))
    tf1.add_to_collection("iterators", iterator.initializer)
    return iterator.get_next()


def dense(x):
    return tf1.layers.dense(tf1.layers.flatten(x), 3, tf.nn.relu)


def convolutional(x):
    x = tf1.layers.conv2d(x, 4, 3, activation=tf.nn.relu)
    x = tf1.layers.batch_normalization(x, training=True, fused=True)
    return tf1.layers.max_pooling2d(x, 2, 2)


def embedded(x):
    table = tf1.get_variable("table", [20, 4])
    return tf.nn.embedding_lookup(table, tf.cast(tf.abs(x[:, 0, :, 0]) * 5, tf.int32) % 20)


def attention(x):
    x = tf1.layers.dense(tf.reshape(x, [-1, 16, 8]), 8)
    x += tf.matmul(tf.nn.softmax(tf.matmul(x, x, transpose_b=True) / 8.0), x)
    x = tf1.layers.batch_normalization(x, training=True)
    return tf1.layers.dense(x, 4, lambda y: 0.5 * y * (1.0 + tf.math.erf(y / 2.0**0.5)))


MODELS = {model.__name__: model for model in (dense, convolutional, embedded, attention)}


def loss_scaled(optimizer):
    manager = ExponentialUpdateLossScaleManager(1024, 2, 1, 2, 0.5)
    return NPUOptimizer(optimizer, loss_scale_manager=manager, is_loss_scale=True)


def train_op_of(model, optimizer, poisoned=()):
    tf1.set_random_seed(3)
    global_step = tf1.train.get_or_create_global_step()
    loss = tf.reduce_mean(tf.square(model(batches(poisoned))))
    train_op = optimizer.minimize(loss, global_step)
    return tf.group(train_op, *tf1.get_collection(tf1.GraphKeys.UPDATE_OPS))


class Fresh:
    """A session of the default graph that can start again from one state."""

    def __init__(self):
        self.session = tf1.Session()
        self.session.run(tf1.global_variables_initializer())
        self._saver = {variable: self.session.run(variable) for variable in tf1.global_variables()}
        self.restart()

    def restart(self):
        self.session.run(tf1.get_collection("iterators"))
        for variable, value in self._saver.items():
            self.session.run(variable.initializer, {variable.initializer.inputs[1]: value})

    def values(self):
        return {variable.name: self.session.run(variable) for variable in tf1.global_variables()}


def one_by_one_and_looped(train_op, steps=STEPS):
    loop, fresh = put_in_loop(train_op.graph, [train_op]), Fresh()
    with fresh.session as session:
        for _ in range(steps):
            session.run(train_op)
        one_by_one = fresh.values()
        fresh.restart()
        session.run(loop.op, {loop.count: steps})
        return one_by_one, fresh.values()


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


def _with_dropout():
    return tf1.assign_add(tf1.get_variable("a", [2]), tf.nn.dropout(tf.ones([2]), rate=0.5)).op


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
