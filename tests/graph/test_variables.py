"""Which variables operators change, and which runs train."""

from __future__ import annotations

import pytest
import tensorflow as tf

from npu_bridge.estimator.npu.npu_loss_scale_manager import FixedLossScaleManager
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
from npu_bridge.graph.operators import computed_ops
from npu_bridge.graph.variables import (
    changed_variables,
    changes_variable,
    global_step_of,
    trained_variables,
    variable_behind,
    variables_updated_from,
)
from tests.goldens.two_layers import OPTIMIZERS, TwoLayers
from tests.session.precision.small_models import Dense, tf1


def trained_by(graph, *ops):
    return trained_variables(graph, computed_ops(ops))


@pytest.mark.parametrize(
    "name, use_resource",
    [("sgd", True), ("sgd", False), ("adam", True), ("adam", False), ("lamb", True), ("keras_adam", True)],
)
def test_training(name, use_resource, graph):
    model = TwoLayers(use_resource)
    optimizer = NPUOptimizer(OPTIMIZERS[name]())
    train_op = optimizer.apply_gradients(optimizer.compute_gradients(model.loss))
    assert trained_by(graph, train_op) >= {"embedding", "kernel"}
    assert not trained_by(graph, model.loss)


def test_training_behind_the_gates_of_loss_scaling(graph):
    model = TwoLayers()
    optimizer = NPUOptimizer(OPTIMIZERS["adam"](), FixedLossScaleManager(8.0), is_loss_scale=True)
    train_op = optimizer.apply_gradients(optimizer.compute_gradients(model.loss))
    assert trained_by(graph, train_op) == {"embedding", "kernel"}


@pytest.mark.parametrize("use_resource", [True, False])
def test_what_does_not_train(use_resource):
    model = Dense(use_resource=use_resource)
    with model.graph.as_default():
        saver = tf1.train.Saver()
        count = tf1.assign_add(model.global_step, 1)
        copies = tf.group(*(variable.assign(variable.read_value()) for variable in model.variables))
        average = tf1.get_variable("average", [16, 4], trainable=False, use_resource=use_resource)
        averaged = average.assign(average * 0.9 + model.out * 0.1)
    graph = model.graph
    restore = graph.get_operation_by_name(saver.saver_def.restore_op_name)
    save = graph.get_tensor_by_name(saver.saver_def.save_tensor_name)
    for op in (model.init, restore, save, count, copies, averaged, model.loss):
        assert not trained_by(graph, op), op.name
    assert trained_by(graph, model.train_op, model.loss) == {"hidden", "bias", "out"}


def test_a_weight_decay_by_hand_trains(graph):
    kernel = tf1.get_variable("kernel", [3])
    decayed = kernel.assign(kernel * 0.99)
    assert trained_by(graph, decayed) == {"kernel"}
    assert not trained_variables(graph, computed_ops([decayed]), assignments_count=False)
    updated = tf1.train.GradientDescentOptimizer(1.0).minimize(tf.reduce_sum(kernel))
    assert trained_variables(graph, computed_ops([updated]), assignments_count=False) == {"kernel"}


def test_a_training_loop_in_one_run_trains(graph):
    kernel = tf1.get_variable("kernel", [3], use_resource=True)

    def body(count):
        with tf.control_dependencies([kernel.assign_sub(kernel * 0.1)]):
            return count + 1

    count = tf1.while_loop(lambda count: count < 3, body, [tf.constant(0)])
    assert trained_by(graph, count) == {"kernel"}
    reading = tf1.while_loop(
        lambda count, _: count < 3, lambda count, total: (count + 1, total + kernel), [tf.constant(0), tf.zeros([3])]
    )
    assert not trained_by(graph, reading[1])


@pytest.mark.parametrize("use_resource", [True, False])
def test_initializers_do_not_train(graph, use_resource):
    first = tf1.get_variable("first", initializer=tf.random.normal([2]), use_resource=use_resource)
    start = first.read_value() if use_resource else first.initialized_value()
    tf1.get_variable("second", initializer=start * 2.0, use_resource=use_resource)
    assert not trained_by(graph, tf1.global_variables_initializer())


def test_a_function_that_only_reads_changes_nothing(graph):
    kernel = tf.Variable([1.0, 2.0], name="kernel")
    count = tf.Variable(0, name="count", trainable=False)

    @tf.function
    def step(is_writing):
        if is_writing:
            kernel.assign_sub(kernel * 0.1)
        return tf.reduce_sum(kernel)

    reading, writing = computed_ops([step(False)]), computed_ops([step(True), count.assign_add(1)])
    assert changed_variables(reading) == set()
    assert changed_variables(writing) == {"kernel", "count"}
    assert not trained_variables(graph, reading)
    assert trained_variables(graph, writing) == {"kernel"}


def test_types_that_change_variables():
    changing = ("ApplyAdam", "ResourceApplyAdam", "ResourceSparseApplyAdagrad", "_FusedResourceApplyMomentum", "Assign")
    assert all(map(changes_variable, (*changing, "AssignVariableOp", "ScatterAdd", "ScatterNdUpdate")))
    assert not any(map(changes_variable, ("ScatterNd", "ScatterNdNonAliasingAdd", "TensorScatterUpdate", "MatMul")))


def test_the_variable_behind_switches_and_copies(graph):
    variable = tf1.get_variable("v", [1], use_resource=True)
    inside = tf.raw_ops.Switch(data=tf.raw_ops.Identity(input=variable.handle), pred=True)[0]
    assert variable_behind(inside) == "v"
    assert variable_behind(variable.value()) is None
    assert variable_behind(tf.raw_ops.MutexV2()) is None


def test_variables_that_tensors_update(graph):
    first, second = tf1.get_variable("first", [2]), tf1.get_variable("second", [2])
    gradient = tf.square(tf.constant([1.0, 2.0]))
    rows = tf.IndexedSlices(gradient * 2.0, tf.constant([0, 1]))
    optimizer = tf1.train.GradientDescentOptimizer(1.0)
    optimizer.apply_gradients([(gradient + 1.0, second)])
    assert variables_updated_from([rows]) == []
    assert variables_updated_from([gradient]) == [second]
    optimizer.apply_gradients([(rows, first)])
    assert variables_updated_from([rows]) == [first]
    assert variables_updated_from([gradient]) == [first, second]
    assert variables_updated_from([]) == []


@pytest.mark.parametrize("shape, dtype", [([], tf.float32), ([2], tf.int64)])
def test_a_global_step_that_counts_nothing_is_none_to_a_session(shape, dtype, graph):
    assert global_step_of(graph) is None
    step = tf1.get_variable("global_step", shape, dtype, tf1.zeros_initializer(), trainable=False)
    model = TwoLayers()
    optimizer = NPUOptimizer(OPTIMIZERS["sgd"](), FixedLossScaleManager(8.0), is_loss_scale=True)
    train_op = optimizer.apply_gradients(optimizer.compute_gradients(model.loss))
    assert global_step_of() is None
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        session.run([train_op, step], {model.tokens: [1, 2]})


def test_a_global_step_that_counts(graph):
    step = tf1.train.get_or_create_global_step()
    assert global_step_of().name == step.name


def test_copies_between_ranks_do_not_train_whatever_pads_them(graph):
    """TensorFlow's own collectives send vectors of a few sizes, which integers are computed for."""
    weight = tf1.get_variable("weight", [3], use_resource=True)
    size = tf.gather([4, 16], tf.searchsorted([4, 16], [tf.size(weight)])[0])
    padded = tf.pad(tf.reshape(weight, [-1]), [[0, size - tf.size(weight)]])
    copied = weight.assign(tf.ensure_shape(padded[: tf.size(weight)], [3]))
    assert trained_by(graph, copied.op) == frozenset()
    assert trained_by(graph, weight.assign(2.0 * padded[:3]).op) == {"weight"}
