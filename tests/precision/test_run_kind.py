from __future__ import annotations

import pytest
import tensorflow as tf

from npu_bridge.estimator.npu.npu_loss_scale_manager import FixedLossScaleManager
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
from npu_bridge.precision.run_kind import kind_of
from tests.precision.small_models import Dense, tf1
from tests.training import OPTIMIZERS, TwoLayers


def trained_by(graph, *ops):
    return kind_of(graph, [op if isinstance(op, tf.Operation) else op.op for op in ops]).trained


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
    assert trained_by(graph, kernel.assign(kernel * 0.99)) == {"kernel"}


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


def test_fed_tensors_cut_a_run_short():
    model = Dense()
    kind = kind_of(model.graph, [model.loss.op], [model.logits.name])
    assert model.logits.op not in kind.ops
    assert model.loss.op in kind.ops
