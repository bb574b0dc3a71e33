"""Self-written loops: backward passes with `scale_loss`, their sum, and the state of loss scales as plain numbers."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.amp.custom_loops import load_state_dict, scale_loss, state_dict, unscaled_gradients
from npu_bridge.amp.loss_scale import DynamicLossScaleManager
from npu_bridge.estimator.npu.npu_helpers import npu_keras_optimizer
from npu_bridge.estimator.npu.npu_loss_scale_manager import FixedLossScaleManager, LossScaleManager
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
from npu_bridge.stages import Accumulate, ClipByGlobalNorm

tf1 = tf.compat.v1
INF = np.inf


class Loop:
    """Passes of the loss `slope * variable`, (slope, loss_id, delay_unscale), and then an update by momentum."""

    def __init__(self, optimizer=None, managers=None, stages=(), is_function=True):
        inner = tf.keras.optimizers.legacy.SGD(1.0, momentum=0.5) if optimizer is None else optimizer
        self.managers = [DynamicLossScaleManager.apex(2.0**4, scale_window=2)] if managers is None else managers
        self.optimizer = npu_keras_optimizer(inner, self.managers, stages=stages)
        self.variable = tf.Variable(0.0)
        self._functions = {}
        self._is_function = is_function

    def update(self, *passes):
        """Of passes that differ in nothing but their slopes the same function is used."""
        kinds = tuple(rest for _, *rest in passes)
        slopes = tf.constant([slope for slope, *_ in passes])
        if str(kinds) not in self._functions:
            made = self._made(kinds)
            self._functions[str(kinds)] = tf.function(made) if self._is_function else made
        self._functions[str(kinds)](slopes)
        return self.variable.numpy()

    def _made(self, kinds):
        def update(slopes):
            for position, arguments in enumerate(kinds):
                with tf.GradientTape() as tape:
                    loss = self.variable * slopes[position]
                with scale_loss(loss, self.optimizer, *arguments) as scaled:
                    scaled.backward(tape, [self.variable])
            self.optimizer.apply_gradients(unscaled_gradients(self.optimizer))

        return update

    def trained(self):
        """The bits of the variable, its slots, and what stages keep of gradients."""
        variables = [self.variable, *self.optimizer.variables()]
        counts = ("loss_scale", "good_steps", "bad_steps", "skipped")
        return {
            each.name: each.numpy().tobytes() for each in variables if not any(name in each.name for name in counts)
        }


@pytest.mark.parametrize("is_function", [True, False])
@pytest.mark.parametrize("stages", [(), (ClipByGlobalNorm(1e9),)])
def test_passes_add_up_and_an_overflow_in_one_skips_once(is_function, stages):
    loop = Loop(is_function=is_function, stages=stages)
    assert loop.update((1.0,), (2.0,)) == -3.0
    before = loop.trained()
    assert len(before) == 3  # with iterations and the momentum
    assert loop.update((1.0,), (INF,)) == -3.0
    assert loop.trained() == before
    assert loop.optimizer.last_step == ((-3.0, -INF), True, 16.0)
    assert loop.managers[0].get_state() == (8.0, 0, 0)
    assert loop.update((1.0,), (2.0,)) == -3.0 - 3.0 - 1.5  # with the momentum of the first update


def test_a_skipped_step_leaves_weights_slots_and_sums_bit_for_bit():
    loop = Loop(stages=(Accumulate(2, exchange="batch"),))
    for slope in (1.0, 2.0, 3.0):
        loop.update((slope,), (slope,))
    before = loop.trained()
    assert any("accumulated/" in name and any(value) for name, value in before.items())
    assert any("momentum" in name and any(value) for name, value in before.items())
    loop.update((1.0,), (INF,))
    assert loop.trained() == before
    assert loop.optimizer.last_step.overflow is True


def test_delayed_passes_are_unscaled_with_the_last_one():
    loop = Loop(is_function=True)
    assert loop.update((1.0, 0, True), (2.0, 0, True), (4.0,)) == -7.0
    assert loop.update((INF, 0, True), (4.0,)) == -7.0
    assert loop.managers[0].get_state() == (8.0, 0, 0)


def test_delayed_passes_of_two_losses_keep_their_scales():
    loop = Loop(managers=[DynamicLossScaleManager.apex(2.0**4), DynamicLossScaleManager.apex(2.0**10)])
    assert loop.update((1.0, 0, True), (2.0, 1, True), (4.0, 0), (8.0, 1)) == -15.0
    loop.update((1.0, 0, True), (INF, 1, True), (4.0, 0), (8.0, 1))
    assert [manager.get_state().scale for manager in loop.managers] == [2.0**4, 2.0**9]


def test_a_graph_takes_passes_by_tensor():
    with tf.Graph().as_default(), tf1.Session() as session:
        variable = tf1.get_variable("variable", initializer=0.0)
        slope = tf1.placeholder(tf.float32, [])
        manager = DynamicLossScaleManager.apex(2.0**4)
        optimizer = NPUOptimizer(tf1.train.GradientDescentOptimizer(1.0), manager, True, True)
        for loss in (variable * slope, variable * 2.0):
            with scale_loss(loss, optimizer) as scaled:
                scaled.add(zip(tf.gradients(scaled.tensor, [variable]), [variable]))
        train_op = optimizer.apply_gradients(unscaled_gradients(optimizer))
        session.run(tf1.global_variables_initializer())
        for value, expected in ((1.0, (-3.0, 16.0)), (INF, (-3.0, 8.0)), (3.0, (-8.0, 8.0))):
            _, report = session.run([train_op, optimizer.last_step], {slope: value})
            assert (session.run(variable), manager.get_state(session).scale) == expected
            assert report.overflow == (value == INF)
        assert state_dict(optimizer, session) == {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 1, "bad_steps": 0}}
        load_state_dict(optimizer, {"loss_scaler0": {"loss_scale": 4.0, "unskipped": 7}}, session)
        assert manager.get_state(session) == (4.0, 7, 0)


def test_a_loss_of_16_bits_is_scaled_in_32():
    loop = Loop()
    with tf.GradientTape() as tape:
        loss = tf.cast(loop.variable, tf.float16) * 2
    with scale_loss(loss, loop.optimizer) as scaled:
        assert scaled.tensor.dtype == tf.float32
        (grad,) = scaled.backward(tape, [loop.variable])
    assert grad == 32.0
    ((grad, _),) = unscaled_gradients(loop.optimizer)
    assert grad == 2.0


def a_pass(loop, slope=1.0, **arguments):
    with tf.GradientTape() as tape:
        loss = loop.variable * slope
    with scale_loss(loss, loop.optimizer, **arguments) as scaled:
        scaled.backward(tape, [loop.variable])


def test_wrong_moments_are_refused_and_nothing_is_left_of_them():
    loop = Loop(is_function=False)
    with pytest.raises(ValueError, match="no gradients.*scaled.backward"):
        unscaled_gradients(loop.optimizer)
    a_pass(loop, delay_unscale=True)
    with pytest.raises(ValueError, match="still multiplied.*loss_id=0.*Leave delay_unscale out"):
        unscaled_gradients(loop.optimizer)
    with pytest.raises(ValueError, match="the pass has no gradients"), scale_loss(tf.constant(1.0), loop.optimizer):
        pass
    a_pass(loop)
    with pytest.raises(KeyError), scale_loss(tf.constant(1.0), loop.optimizer):
        raise KeyError("of the script")
    with pytest.raises(ValueError, match="last_step.*no step so far"):
        print(loop.optimizer.last_step)
    assert loop.update((1.0,)) == -1.0
    with pytest.raises(ValueError, match="0 <= loss_id < 1"):
        a_pass(loop, loss_id=1)


def test_steps_report_in_fit():
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", input_shape=[1])])
    for generation in (tf.keras.optimizers, tf.keras.optimizers.legacy):
        optimizer = npu_keras_optimizer(generation.SGD(0.0), DynamicLossScaleManager.apex(2.0**4))
        model.compile(optimizer, loss="mse")
        reports = []
        note = tf.keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda *_, optimizer=optimizer, reports=reports: reports.append(optimizer.last_step)
        )
        features = np.array([[2.0], [INF], [3.0]])
        model.fit(features, np.zeros([3, 1]), batch_size=1, shuffle=False, verbose=0, callbacks=[note])
        assert [report.overflow for report in reports] == [False, True, False]
        assert [report.loss_scale for report in reports] == [16.0, 16.0, 8.0]
        assert [report.loss for report in reports] == [4.0, INF, 9.0]


def three_scales():
    managers = [DynamicLossScaleManager.apex(2.0**4, scale_window=9), FixedLossScaleManager(8.0)]
    return Loop(managers=[*managers, DynamicLossScaleManager.mindspore(2.0**10)])


def test_the_state_goes_through_a_file_and_training_goes_on():
    whole, half, rest = three_scales(), three_scales(), three_scales()
    steps = [
        ((slope, 0), (1.0, 1), (other, 2)) for slope, other in [(1.0, INF), (2.0, 1.0), (INF, 1.0), (1.0, 1.0)] * 4
    ]
    for passes in steps:
        whole.update(*passes)
    for passes in steps[:7]:
        half.update(*passes)
    load_state_dict(rest.optimizer, json.loads(json.dumps(state_dict(half.optimizer))))
    assert state_dict(rest.optimizer) == state_dict(half.optimizer)
    for passes in steps[7:]:
        rest.update(*passes)
    assert state_dict(rest.optimizer) == state_dict(whole.optimizer)
    assert state_dict(whole.optimizer)["loss_scaler1"] == {"loss_scale": 8.0, "unskipped": 0, "bad_steps": 0}


def test_more_states_than_managers_are_left_out_with_a_warning(caplog):
    loop = Loop()
    with caplog.at_level(logging.WARNING):
        load_state_dict(loop.optimizer, state_dict(three_scales().optimizer))
    assert "ignored loss_scaler1, loss_scaler2" in caplog.text


@pytest.mark.parametrize(
    "state, error, part",
    [
        ({"loss_scale0": {}}, ValueError, "loss_scaler0"),
        ({"loss_scaler0": {"loss_scale": 8.0, "unskiped": 1}}, ValueError, "Did you mean 'unskipped'"),
        ({"loss_scaler0": {"loss_scale": 8.0}}, ValueError, "unskipped is missing"),
        ({"loss_scaler0": {"loss_scale": "8", "unskipped": 0}}, TypeError, "'8'"),
        ({"loss_scaler0": {"loss_scale": 2.0**30, "unskipped": 0}}, ValueError, "1.67772e+07"),
        ({"loss_scaler0": {"loss_scale": 8.0, "unskipped": -1}}, ValueError, "at least 0"),
        ({"loss_scaler1": {"loss_scale": 4.0, "unskipped": 0}}, ValueError, "loss_scale=8.0"),
        ({"loss_scaler0": 8.0}, TypeError, "loss_scaler0 is not a dictionary"),
        ({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 1.0}}, TypeError, "got 1.0 (float)"),
        ({"loss_scaler0": {"loss_scale": 8.0, "unskipped": True}}, TypeError, "got True (bool)"),
        ({"loss_scaler0": {"loss_scale": [8.0], "unskipped": 1}}, ValueError, "loss_scaler0: loss_scale has another"),
        ({"loss_scaler0": {"loss_scale": 8.0, "unskipped": [1, [2]]}}, ValueError, "unskipped has another shape"),
        ({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 2**40}}, ValueError, "unskipped is out of range"),
        ({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 1, "bad_steps": "2"}}, TypeError, "bad_steps is not"),
        ({"loss_scaler1": {"loss_scale": 8.0, "unskipped": "many"}}, TypeError, "loss_scaler1: unskipped is not"),
    ],
)
def test_a_wrong_state_is_refused_as_a_whole(state, error, part):
    loop = three_scales()
    before = state_dict(loop.optimizer)
    good = {"loss_scaler2": {"loss_scale": 4.0, "unskipped": 1}}
    with pytest.raises(error) as caught:
        load_state_dict(loop.optimizer, {**good, **state})
    assert part in str(caught.value)
    assert state_dict(loop.optimizer) == before


def test_the_state_of_a_manager_of_ones_own_is_not_left_out_without_a_word():
    class Own(LossScaleManager):
        get_loss_scale = FixedLossScaleManager(8.0).get_loss_scale

        def update_loss_scale(self, finite_grads):
            return None

    with pytest.raises(TypeError, match="state_dict: the numbers of a manager are not known.*Own.*Save its variables"):
        state_dict(Loop(managers=Own()).optimizer)


@pytest.mark.parametrize("state", [None, [("loss_scaler0", {})]])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(TypeError, match="load_state_dict: state is not a dictionary. Expected .* got"):
        load_state_dict(Loop().optimizer, state)
