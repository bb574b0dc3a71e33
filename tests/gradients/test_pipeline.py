"""One pipeline, three ways to train: TF 1 graph, `tf.function` and eager execution."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.estimator.npu.npu_helpers import npu_keras_optimizer
from npu_bridge.estimator.npu.npu_loss_scale_manager import (
    ExponentialUpdateLossScaleManager,
    FixedLossScaleManager,
)
from npu_bridge.estimator.npu.npu_loss_scale_optimizer import NPULossScaleOptimizer
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
from npu_bridge.gradients import OverflowCheck, Pipeline, Stage
from npu_bridge.gradients.stage import HOOKS, LossStage, ReducingStage
from npu_bridge.gradients.stages.accumulation import Accumulate
from tests.goldens.two_layers import OPTIMIZERS, in_graph


class Recorder(LossStage):
    """Writes down which hook was called."""

    def __init__(self, name, calls, place):
        self.place = place
        for hook in HOOKS:
            setattr(self, hook, self._recording(hook, f"{name}.{hook}", calls))

    def _recording(self, hook, entry, calls):
        def record(first, second=None):
            calls.append(entry)
            if hook == "scale_loss":
                return first
            return second() if hook == "gate" else None

        return record


class ReducingRecorder(Recorder, ReducingStage):
    pass


def test_stages_meet_a_gradient_in_order():
    calls = []
    pipeline = Pipeline([ReducingRecorder("b", calls, "transform"), Recorder("a", calls, "scale")])
    step = pipeline.begin()
    pipeline.scale(tf.constant(1.0), step)
    pairs = pipeline.combine(step, [(tf.constant(1.0), "variable")])
    pipeline.apply(step, pairs, lambda pairs: calls.append("update"))
    before_update = ["scale_loss", "create_variables", *HOOKS[2:7]]
    assert calls == [
        *(f"{stage}.{hook}" for hook in before_update for stage in ("b" if hook == "all_reduce" else "ab")),
        "update",
        "a.after_update",
        "b.after_update",
    ]


def test_the_gradients_that_the_caller_clipped_are_applied_and_checked():
    kernel, seen = tf.Variable([1.0, 2.0]), []
    pipeline = Pipeline([OverflowCheck("clipped", is_joint=False)])
    for gradient in ([0.5, 4.0], [0.5, np.inf]):
        step = pipeline.begin()
        pairs = pipeline.combine(step, [(tf.constant(gradient), kernel)])
        clipped = [(tf.clip_by_value(grad, -1.0, 1.0), variable) for grad, variable in pairs]
        pipeline.apply(step, clipped, lambda pairs: pairs[0][1].assign_sub(pairs[0][0]))
        seen.append(kernel.numpy().tolist())
    assert seen == [[0.5, 1.0], [0.5, 1.0]]  # clipping hid an infinity, so the second step was skipped


def test_a_hook_that_plain_stages_lack_is_refused():
    """Else no pipeline would call it, and gradients would not be combined, without a word."""
    with pytest.raises(TypeError, match=r"Write class OfItsOwn\(stages.ReducingStage\)"):

        class OfItsOwn(Stage):
            def all_reduce(self, step):
                pass


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("decorate", [lambda function: function, tf.function], ids=["eager", "tf.function"])
def test_minimize_with_a_callable_loss(name, decorate):
    """`NPUOptimizer` itself outside of TF 1 graphs; the same bits as the inner optimizer alone."""

    def trained(wrap):
        variable = tf.Variable([1.0, -2.0, 3.0])
        optimizer = wrap(OPTIMIZERS[name]())

        @decorate
        def train(poison):
            optimizer.minimize(lambda: tf.reduce_sum(tf.square(variable) * poison), var_list=[variable])

        for poison in (1.0, 1.0, np.inf, 1.0):
            if np.isfinite(poison) or isinstance(optimizer, NPUOptimizer):
                train(tf.constant(poison))
        return variable.numpy()

    manager = ExponentialUpdateLossScaleManager(2.0**12, 100, 1, 2, 0.5)
    ours = trained(lambda optimizer: NPUOptimizer(optimizer, manager, is_distributed=True, is_loss_scale=True))
    np.testing.assert_array_equal(ours, trained(lambda optimizer: optimizer))
    assert manager.get_loss_scale().numpy() == 2.0**11


@pytest.mark.parametrize("wrap", [NPUOptimizer, NPULossScaleOptimizer, npu_keras_optimizer])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_may_be_arrays_as_with_the_optimizer_alone(name, wrap):
    def trained(optimizer):
        variables = [tf.Variable([1.0, -2.0]), tf.Variable([[1.0], [2.0]])]
        for _ in range(2):
            rows = tf.IndexedSlices(tf.constant([[0.5]]), np.array([1]), (2, 1))
            optimizer.apply_gradients([(np.float32([0.25, 3.0]), variables[0]), (rows, variables[1])])
        return [variable.numpy() for variable in variables]

    optimizer = OPTIMIZERS[name]()
    if isinstance(optimizer, tf.compat.v1.train.Optimizer) == (wrap is npu_keras_optimizer):
        pytest.skip("takes optimizers of the other library")
    ours = wrap(optimizer, loss_scale_manager=FixedLossScaleManager(8.0))
    np.testing.assert_equal(trained(ours), trained(OPTIMIZERS[name]()))


@pytest.mark.parametrize("poison", [1.0, np.inf])
def test_gradients_may_be_complex(poison):
    optimizer = npu_keras_optimizer(tf.keras.optimizers.legacy.SGD(0.5), FixedLossScaleManager(8.0))
    variable = tf.Variable([1.0 + 2.0j], dtype=tf.complex64)
    optimizer.minimize(lambda: tf.reduce_sum(tf.abs(variable) ** 2) * poison, [variable])
    np.testing.assert_array_equal(variable.numpy(), [0.0 if poison == 1.0 else 1.0 + 2.0j])


@pytest.mark.parametrize("family", [tf.keras.optimizers, tf.keras.optimizers.legacy], ids=["keras", "legacy"])
def test_an_optimizer_of_a_script_may_apply_gradients_without_a_name(family):
    class Own(family.SGD):
        def apply_gradients(self, grads_and_vars):
            return super().apply_gradients(grads_and_vars)

    variable = tf.Variable(1.0)
    npu_keras_optimizer(Own(0.5), FixedLossScaleManager(8.0)).apply_gradients([(tf.constant(1.0), variable)])
    assert variable.numpy() == 0.5


@pytest.mark.parametrize("family", [tf.keras.optimizers, tf.keras.optimizers.legacy], ids=["keras", "legacy"])
@pytest.mark.parametrize("in_function", [False, True])
def test_a_mirrored_strategy_of_one_device_skips_and_counts(family, in_function):
    strategy = tf.distribute.MirroredStrategy(["/cpu:0"])
    with strategy.scope():
        variable = tf.Variable(1.0)
        optimizer = npu_keras_optimizer(family.SGD(0.5, momentum=0.5), ExponentialUpdateLossScaleManager(8.0, 3))

    def update(grad):
        optimizer.apply_gradients(zip(optimizer.get_unscaled_gradients([grad]), [variable]))

    step = tf.function(update) if in_function else update
    for grad, value, counter in ((8.0, 0.5, 1), (np.inf, 0.5, 0), (8.0, -0.25, 1)):
        strategy.run(step, args=(tf.constant(grad),))
        assert (variable.numpy(), int(optimizer.dynamic_counter)) == (value, counter)


def test_a_checkpoint_of_a_legacy_optimizer_names_the_class_to_write(tmp_path):
    variable, legacy = tf.Variable(1.0), tf.keras.optimizers.legacy.Adam()
    legacy.apply_gradients([(tf.constant(1.0), variable)])
    path = tf.train.Checkpoint(variable=variable, optimizer=legacy).write(str(tmp_path / "old"))
    current = npu_keras_optimizer(tf.keras.optimizers.Adam())
    with pytest.raises(ValueError, match=r"optimizers\.legacy\.Adam`"):
        tf.train.Checkpoint(variable=variable, optimizer=current).read(path)


@pytest.mark.parametrize("name", ["adam", "keras_legacy_adam", "keras_adam"])
def test_checkpoint_objects_hold_the_scale_and_the_inner_optimizer(name, tmp_path):
    def make():
        manager = ExponentialUpdateLossScaleManager(64.0, 100, 1, 2, 0.5)
        optimizer = NPUOptimizer(OPTIMIZERS[name](), manager, is_loss_scale=True)
        return manager, optimizer, tf.Variable(1.0)

    manager, optimizer, variable = make()
    optimizer.minimize(lambda: variable * np.inf, var_list=[variable])
    optimizer.minimize(lambda: variable * 2.0, var_list=[variable])
    path = tf.train.Checkpoint(optimizer=optimizer, variable=variable).save(str(tmp_path / "model"))
    restored_manager, restored_optimizer, restored_variable = make()
    tf.train.Checkpoint(optimizer=restored_optimizer, variable=restored_variable).restore(path)
    assert restored_manager.get_loss_scale().numpy() == 32.0
    for one, other in ((optimizer, variable), (restored_optimizer, restored_variable)):
        one.minimize(lambda variable=other: variable * 0.0, var_list=[other])  # moves by momentum alone
    assert restored_variable.numpy() == variable.numpy() != 1.0


@pytest.mark.parametrize("name", ["lamb", "keras_adam"])
def test_keras_optimizers_train_reference_variables(graph, name):
    weight = tf.compat.v1.get_variable("weight", [2], initializer=tf.ones_initializer(), use_resource=False)
    optimizer = NPUOptimizer(OPTIMIZERS[name]())
    step = optimizer.minimize(tf.reduce_sum(tf.square(weight)), var_list=[weight])
    with tf.compat.v1.Session() as session:
        session.run(tf.compat.v1.global_variables_initializer())
        for _ in range(3):
            session.run(step)
        after, moment = session.run([weight, optimizer.get_slot(weight, "m")])
    assert np.all(after < 0.9) and np.all(moment > 0)


def test_a_learning_rate_that_is_set_is_that_of_the_inner_optimizer():
    weight, inner = tf.Variable(0.0), tf.keras.optimizers.SGD(1.0)
    optimizer = NPUOptimizer(inner)
    optimizer.learning_rate = 0.25
    optimizer.note = "kept"
    optimizer.minimize(lambda: -weight, var_list=[weight])
    assert float(weight) == float(inner.learning_rate) == 0.25
    assert optimizer.note == "kept" and not hasattr(inner, "note")


@in_graph
def test_gradients_are_recognised_after_those_of_another_loss():
    """`Accumulate` refuses gradients from elsewhere; these may even be applied in two ways."""
    first, second = (tf.compat.v1.get_variable(name, initializer=0.0, use_resource=True) for name in ("a", "b"))
    optimizer = NPUOptimizer(tf.compat.v1.train.GradientDescentOptimizer(1.0), stages=[Accumulate(1)])
    pairs = optimizer.compute_gradients(first * 2 + second, [first, second])
    optimizer.compute_gradients(first * 3, [first])
    train, _ = optimizer.apply_gradients(pairs), optimizer.apply_gradients(pairs)
    with tf.compat.v1.Session() as session:
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(train)
        assert session.run([first, second]) == [-2.0, -1.0]


def test_eager_gradients_of_two_losses_are_both_recognised():
    first, second = tf.Variable(0.0), tf.Variable(0.0)
    optimizer = NPUOptimizer(tf.compat.v1.train.GradientDescentOptimizer(1.0), stages=[Accumulate(1)])
    for _ in range(2):
        of_first = optimizer.compute_gradients(lambda: first * 2, [first])
        of_second = optimizer.compute_gradients(lambda: second * 3, [second])
        optimizer.apply_gradients(of_first)
        optimizer.apply_gradients(of_second)
    assert (float(first), float(second)) == (-4.0, -6.0)
    assert len(optimizer._open_steps._steps) == 2, "steps that were applied pile up"


@pytest.mark.parametrize("family", [tf.keras.optimizers, tf.keras.optimizers.legacy], ids=["keras", "legacy"])
def test_gradients_of_a_loss_that_the_caller_has_scaled_are_unscaled(family):
    optimizer = npu_keras_optimizer(family.SGD(1.0), FixedLossScaleManager(8))
    (grad,) = optimizer.get_unscaled_gradients([tf.constant([16.0])])
    assert grad.numpy() == [2.0]
    variable = tf.Variable([1.0])
    optimizer.apply_gradients([(grad, variable)])
    assert variable.numpy() == [-1.0]
    with pytest.raises(ValueError, match="there is no step to report"):
        _ = optimizer.last_step
