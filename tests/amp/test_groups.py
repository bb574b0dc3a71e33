"""Group loss scales: what boundaries do to gradients, the scale of each group, and all of them alike."""

from __future__ import annotations

import contextlib
import copy
import re

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.amp.groups import GroupLossScaleManager, scale_boundary
from npu_bridge.amp.loss_scale import DynamicLossScaleManager
from npu_bridge.estimator.npu.npu_helpers import npu_keras_optimizer
from npu_bridge.estimator.npu.npu_loss_scale_optimizer import NPULossScaleOptimizer
from npu_bridge.estimator.npu.npu_optimizer import NPUDistributedOptimizer, NPUOptimizer
from npu_bridge.stages import ClipByGlobalNorm
from tests.goldens.cases import GOLDENS, TABLES, dynamic
from tests.goldens.problems import Layers
from tests.goldens.two_layers import assert_same_bits
from tests.goldens.ways import InGraph
from tests.refusing import refuses

tf1 = tf.compat.v1


def of_variables(patterns, _):
    """A manager that is given variables in place of patterns, and moves as plain loss scaling does."""
    groups = [[each for each in tf1.trainable_variables() if re.search(pattern, each.name)] for pattern in patterns]
    return GroupLossScaleManager(groups, 2.0**10, 2.0, 0.5, 4)


@pytest.mark.few_fast(1, "gradients/test_goldens.py has groups with stages")
@pytest.mark.parametrize("stages", [(), ("accumulate two",), ("accumulate reduced", "clip layers by norm")])
def test_groups_with_equal_scales_are_plain_loss_scaling_bit_for_bit(stages):
    problem = Layers(12, is_poisonable=True)
    grouped = GOLDENS["groups"]._replace(
        problem=problem, stages=tuple(TABLES[stage] for stage in stages), managers=(of_variables,)
    )
    plain = grouped._replace(groups=(), managers=(dynamic,), scales=((2.0**10, 4),))
    for ours, expected in zip(*(InGraph(golden).train(problem.fed_to(0)) for golden in (grouped, plain))):
        assert_same_bits(ours.values, expected.values)
        # With sums of a window plain loss scaling moves with each window, groups with each batch.
        assert set(ours.scales) == {expected.scales} or "accumulate two" in stages


def gradients_at(scales, marks):
    """Of x * 3 the gradient of the sum at each mark on the way, as the boundaries have it."""
    manager = GroupLossScaleManager([f"group_{number}" for number, _ in enumerate(scales)], scales)
    x = tf.constant(2.0)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        seen = [x]
        for i, j in marks:
            seen.append(scale_boundary(seen[-1], i, j, manager))
        y = seen[-1] * 3.0
    return [float(tape.gradient(y, each)) for each in seen]


def test_between_boundaries_gradients_have_the_scale_of_their_group():
    assert gradients_at([8.0, 64.0], [(0, 1), (1, 2), (2, 0)]) == [3.0, 24.0, 192.0, 3.0]
    assert gradients_at([8.0, 64.0], [(0, 1), (1, 2), (2, 3)]) == [3.0, 24.0, 192.0, 3.0]
    assert gradients_at([8.0], []) == [3.0]


def test_a_boundary_changes_nothing_without_a_manager_and_keeps_16_bits():
    manager = GroupLossScaleManager(["a", "b"], [2.0**20, 2.0**18])
    for dtype in (tf.float16, tf.bfloat16, tf.float32, tf.float64):
        x = tf.constant([1.5, -2.0], dtype)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = scale_boundary(x, 1, 2, manager)  # 2**20 is no float16, but their ratio is
        gradient = tape.gradient(y, x)
        assert y.dtype == gradient.dtype == dtype
        np.testing.assert_array_equal(tf.cast(y, tf.float64), [1.5, -2.0])
        np.testing.assert_array_equal(tf.cast(gradient, tf.float64), [4.0, 4.0])
    del manager
    with tf.Graph().as_default(), tf1.Session() as session:
        x = tf.constant(1.0)
        assert session.run(tf.gradients(scale_boundary(x, 1, 0), x)[0]) == 1.0


@pytest.mark.parametrize("is_made_eagerly", [True, False])
def test_a_manager_scales_the_gradients_of_each_graph_that_uses_it(is_made_eagerly):
    first = tf.Graph()
    with contextlib.nullcontext() if is_made_eagerly else first.as_default():
        manager = GroupLossScaleManager(["w"])
    for graph in (first, tf.Graph()):
        with graph.as_default(), tf1.Session() as session:
            w = tf1.get_variable("w", initializer=1.0)
            optimizer = NPUOptimizer(tf1.train.GradientDescentOptimizer(1.0), manager, True, True)
            train_op = optimizer.minimize(scale_boundary(w * 3.0, 1, 0))
            session.run(tf1.global_variables_initializer())
            session.run(train_op)
            assert session.run(w) == -2.0
    with tf.Graph().as_default(), pytest.raises(ValueError, match="no gradient was multiplied"):
        optimizer.minimize(scale_boundary(tf1.get_variable("w", initializer=1.0), 1, 0))
    if is_made_eagerly:
        with first.as_default():
            assert manager.has_last_boundary
        copied = copy.deepcopy(manager)
        with first.as_default():
            assert not copied.has_last_boundary


class Blocks(tf.keras.Model):
    def __init__(self, mark=scale_boundary):
        super().__init__()
        self.first = tf.keras.layers.Dense(4, activation="tanh", name="first")
        self.second = tf.keras.layers.Dense(1, name="second")
        self._mark = mark

    def call(self, inputs):
        hidden = self.first(self._mark(inputs, 0, 1))
        return self._mark(self.second(self._mark(hidden, 1, 2)), 2, 0)


def fitted(manager_of, mark, generation=tf.keras.optimizers):
    tf.keras.utils.set_random_seed(1)
    model = Blocks(mark)
    random = np.random.RandomState(3)
    data = random.randn(12, 3).astype(np.float32), random.randn(12, 1).astype(np.float32)
    model.compile(npu_keras_optimizer(generation.Adam(0.1), manager_of(model)), loss="mse")
    model.fit(*data, batch_size=2, verbose=0, shuffle=False)
    return model


@pytest.mark.few_fast(1, "both optimizers of Keras take the same way")
@pytest.mark.parametrize("generation", [tf.keras.optimizers, tf.keras.optimizers.legacy])
def test_layers_are_groups_and_fit_trains_as_with_one_scale(generation):
    grouped = fitted(lambda model: GroupLossScaleManager([model.first, model.second]), scale_boundary, generation)
    plain = fitted(lambda model: DynamicLossScaleManager(2.0**10), lambda x, i, j: x, generation)
    for ours, expected in zip(grouped.get_weights(), plain.get_weights()):
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(grouped.optimizer.loss_scale, [2.0**10 * 2.0 ** (6 / 1000)] * 2, rtol=1e-6)
    assert grouped.optimizer.initial_scale == [2.0**10] * 2


def test_groups_by_names_are_saved_with_a_model():
    manager = GroupLossScaleManager(["first/", ["second/", "third/"]], [8.0, 16.0])
    again = GroupLossScaleManager.from_config(manager.get_config())
    assert again.get_config() == manager.get_config()
    variables = {name: tf.Variable(0.0, name=name) for name in ("net/first/kernel", "net/third/bias")}
    assert [again.group_of(variable) for variable in variables.values()] == [0, 1]
    with pytest.raises(TypeError, match="regular expressions"):
        GroupLossScaleManager([variables["net/first/kernel"]]).get_config()


def test_scales_are_set_one_by_one_or_all_at_once():
    manager = GroupLossScaleManager(["a", "b"], [8.0, 16.0])
    manager.set_loss_scale(4.0)
    np.testing.assert_array_equal(manager.get_state().scale, [4.0, 4.0])
    manager.set_loss_scale([4.0, 32.0])
    np.testing.assert_array_equal(manager.get_loss_scale(), [4.0, 32.0])
    for wrong in ([4.0, 8.0, 16.0], [4.0, -1.0]):
        with pytest.raises(ValueError, match="loss_scale"):
            manager.set_loss_scale(wrong)


def in_step(groups):

    def run():
        with tf.Graph().as_default():
            first, second = (tf1.get_variable(name, initializer=1.0) for name in ("first", "second"))
            manager = GroupLossScaleManager(groups)
            NPUOptimizer(tf1.train.GradientDescentOptimizer(1.0), manager, True, True).minimize(first * second)

    return run


@refuses(
    (lambda: GroupLossScaleManager([]), ValueError, ["not a list of groups", "[]"]),
    (lambda: GroupLossScaleManager("first"), TypeError, ["not a list of groups", "'first'"]),
    (lambda: GroupLossScaleManager([3]), TypeError, ["cannot be a member of a group", "3 (int)"]),
    (lambda: GroupLossScaleManager(["("]), ValueError, ["cannot be read", "'('"]),
    (lambda: GroupLossScaleManager(["a", "b"], [1.0]), ValueError, ["one number, or 2", "[1.0]"]),
    (lambda: GroupLossScaleManager(["a", "b"], [1.0, "x"]), TypeError, ["init", "'x'"]),
    (in_step(["first"]), ValueError, ["second belongs to no group", "one group for each variable"]),
    (in_step(["first", "second|st"]), ValueError, ["first belongs to several groups", "groups 1, 2"]),
    (lambda: scale_boundary(tf.constant(1.0), -1, 1), ValueError, ["scale_boundary", "-1"]),
    (lambda: scale_boundary(tf.constant(1.0), 0, 1.0), TypeError, ["scale_boundary", "1.0"]),
    (
        lambda: npu_keras_optimizer(tf.keras.optimizers.SGD(), [GroupLossScaleManager(["a"])]),
        ValueError,
        ["one scale for each loss", "GroupLossScaleManager"],
    ),
    # Stages inside would work on gradients with the scales of their groups.
    (
        lambda: NPULossScaleOptimizer(
            NPUDistributedOptimizer(tf1.train.GradientDescentOptimizer(0.1), stages=[ClipByGlobalNorm(1.0)]),
            GroupLossScaleManager(["a"]),
            is_distributed=True,
        ),
        ValueError,
        ["still multiplied by the loss scale"],
    ),
)
def test_bad_arguments_are_refused_by_name(make):
    make()


def test_gradients_without_variables_are_refused():
    optimizer = npu_keras_optimizer(tf.keras.optimizers.SGD(), GroupLossScaleManager(["a"]))
    optimizer.get_scaled_loss(tf.constant(1.0))
    with pytest.raises(ValueError, match="GroupScaling needs the variable of each gradient"):
        optimizer.get_unscaled_gradients([tf.constant(1.0)])


def test_a_model_without_the_last_boundary_is_refused():
    with pytest.raises(ValueError, match=r"GroupLossScaleManager: no gradient was multiplied .* scale_boundary\(outp"):
        fitted(
            lambda model: GroupLossScaleManager([model.first, model.second]),
            lambda x, i, j: x if j == 0 else scale_boundary(x, i, j),
        )
