"""Runs that do not repeat themselves, as a variable is read and written in no order."""

from __future__ import annotations

import pytest
import tensorflow as tf

from npu_bridge.estimator.npu.npu_loss_scale_manager import FixedLossScaleManager
from npu_bridge.graph.races import find_races
from npu_bridge.graph.run import record_gradients, run_of
from tests.goldens.two_layers import OPTIMIZERS
from tests.session.precision.small_models import tf1


def model(use_resource):
    kernel = tf1.get_variable("kernel", [3, 3], use_resource=use_resource)
    step = tf1.train.get_or_create_global_step()
    hidden = tf.matmul(tf.ones([2, 3]), kernel)
    loss = tf.reduce_sum(tf.matmul(tf.tanh(hidden), kernel))
    return kernel, step, loss


def races_of(graph, *fetches):
    return set(find_races(run_of(graph, list(fetches))))


@pytest.mark.parametrize("use_resource", [True, False])
@pytest.mark.parametrize("name", ["adam", "momentum"])
def test_optimizers_do_not_race(graph, name, use_resource):
    _, step, loss = model(use_resource)
    train = OPTIMIZERS[name]().minimize(loss, step)
    assert races_of(graph, train, loss) == set()


@pytest.mark.parametrize("use_resource", [True, False])
def test_a_step_counted_beside_a_rate_that_reads_it(graph, use_resource):
    _, step, loss = model(use_resource)
    rate = tf1.train.exponential_decay(0.1, step, 1, 0.5)
    train = tf1.train.GradientDescentOptimizer(rate).minimize(loss)
    assert races_of(graph, train, step.assign(step + 1)) == ({"global_step"})
    assert races_of(graph, train) == set()
    with tf.control_dependencies([train]):
        after = step.assign_add(1)
    assert races_of(graph, after) == set()
    assert races_of(graph, after, step.read_value()) == set(), "who only looks"


def test_a_variable_that_only_the_loss_reads(graph):
    _, step, loss = model(True)
    weight = tf1.get_variable("weight", initializer=1.0, trainable=False, use_resource=True)
    loss += weight
    optimizer = tf1.train.GradientDescentOptimizer(0.1)
    pairs = optimizer.compute_gradients(loss)
    record_gradients(loss, [gradient for gradient, _ in pairs])
    train = optimizer.apply_gradients(pairs, step)
    assert races_of(graph, train, loss, weight.assign(2.0)) == {"weight"}


def test_two_optimizers_on_the_same_variable(graph):
    _, _, loss = model(False)
    first, second = (tf1.train.GradientDescentOptimizer(0.1).minimize(each) for each in (loss, loss * 2.0))
    assert races_of(graph, first, second) == {"kernel"}


@pytest.mark.parametrize("use_resource", [True, False])
def test_assignments_of_what_gradients_say_train(graph, use_resource):
    kernel, step, loss = model(use_resource)
    (gradient,) = tf1.gradients(loss * 1024.0, [kernel])
    record_gradients(loss * 1024.0, [gradient])
    assigned = kernel.assign(kernel - 0.1 * gradient)
    clipped = kernel.assign(tf.clip_by_value(kernel, -1.0, 1.0))
    train = run_of(graph, [assigned.op, step.assign(step + 1).op])
    assert train.trains and run_of(graph, [clipped.op, loss]).trains is False
    assert races_of(graph, assigned.op) <= {"kernel"}


@pytest.mark.parametrize("kind", ["variable", "number", "manager"])
def test_the_loss_is_that_of_the_model(graph, kind):
    kernel, _, loss = model(True)
    scale = 128.0
    if kind == "variable":
        scale = tf1.get_variable("loss_scale", initializer=128.0, trainable=False)
    elif kind == "manager":
        scale = FixedLossScaleManager(128.0).get_loss_scale()
    for scaled, expected in ((loss * scale, loss), (loss * 0.5, None), (loss * (1.0 + tf.reduce_sum(kernel)), None)):
        gradients = tf1.gradients(scaled, [kernel])
        record_gradients(scaled, gradients)
        assert run_of(graph, gradients).loss is (scaled if expected is None else expected)
