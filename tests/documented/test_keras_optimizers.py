"""The documented names for Keras optimizers: signatures, transparency, errors."""

from __future__ import annotations

import json
import sys
import traceback

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import optimizers
from npu_bridge.base.errors import say_once
from npu_bridge.estimator.npu.npu_helpers import npu_keras_optimizer, npu_tf_optimizer
from npu_bridge.estimator.npu.npu_loss_scale_manager import (
    ExponentialUpdateLossScaleManager,
    FixedLossScaleManager,
    LossScaleManager,
)
from npu_bridge.estimator.npu.npu_optimizer import (
    KerasDistributeOptimizer,
    NPUDistributedOptimizer,
    NPUOptimizer,
    npu_distributed_optimizer_wrapper,
)
from npu_bridge.gradients.keras import shared
from npu_bridge.stages import ClipByGlobalNorm
from npu_device.train.optimizer import NpuLossScaleOptimizer
from tests.documented.signatures import signature_of
from tests.goldens.keras_models import fit, make_data

tf1 = tf.compat.v1
KerasLossScaling = tf.keras.mixed_precision.LossScaleOptimizer
GENERATIONS = {"current": tf.keras.optimizers, "legacy": tf.keras.optimizers.legacy}
EACH_GENERATION = pytest.mark.parametrize("generation", GENERATIONS.values(), ids=list(GENERATIONS))
SIGNATURES = {
    KerasDistributeOptimizer: "(optimizer, name='NpuKerasOptimizer', **kwargs)",
    npu_distributed_optimizer_wrapper: "(optimizer)",
    npu_tf_optimizer: "(opt)",
    npu_keras_optimizer: (
        "(opt, loss_scale_manager=None, is_distributed=True, is_loss_scale=None, is_tailing_optimization=False, *, "
        "wire='none', stages=(), gradient_split_groups=None, combine_grad=False, check_combined_tensors=False)"
    ),
}


def manager():
    return ExponentialUpdateLossScaleManager(2.0**10, 100, 1, 2, 0.5)


@EACH_GENERATION
def test_it_says_what_made_it_and_what_it_does(generation):
    optimizer = npu_keras_optimizer(generation.SGD())
    assert repr(optimizer) == repr(KerasDistributeOptimizer(generation.SGD()))
    assert repr(optimizer) == "KerasDistributeOptimizer(SGD, stages=[AllReduce()])"
    scaling = npu_keras_optimizer(generation.SGD(), FixedLossScaleManager(2.0), stages=[ClipByGlobalNorm(1.0)])
    assert repr(scaling).startswith("npu_keras_optimizer(SGD, stages=[LossScaling(FixedLossScaleManager), AllReduce()")
    with pytest.raises(ValueError, match="got KerasDistributeOptimizer, which is distributed already"):
        npu_keras_optimizer(optimizer)


def test_a_scale_that_is_given_as_to_other_libraries_is_told_as_a_manager():
    sgd = tf1.train.GradientDescentOptimizer(1.0)
    with pytest.raises(TypeError, match=r"Write loss_scale_manager=FixedLossScaleManager\(128\), is_loss_scale=True"):
        NPUOptimizer(sgd, loss_scale=128)
    with pytest.raises(TypeError, match=r"unknown argument 'loss_scale'.*=FixedLossScaleManager\(128\)\."):
        npu_keras_optimizer(tf.keras.optimizers.SGD(), loss_scale=128)
    with pytest.raises(TypeError, match=r"Write ExponentialUpdateLossScaleManager\(init"):
        NPUOptimizer(sgd, loss_scale_manager="dynamic", is_loss_scale=True)
    with pytest.raises(TypeError, match=r"Write GradientDescentOptimizer\(\.\.\.\)"):
        NPUOptimizer(tf1.train.GradientDescentOptimizer)
    with pytest.raises(TypeError, match="Did you mean 'is_distributed'"):
        npu_keras_optimizer(tf.keras.optimizers.SGD(), is_distribute=True)


@pytest.mark.parametrize("documented", SIGNATURES, ids=lambda documented: documented.__name__)
def test_signature(documented):
    assert signature_of(documented) == SIGNATURES[documented]


@EACH_GENERATION
def test_it_is_an_optimizer_of_the_same_generation(generation):
    plain, short = KerasDistributeOptimizer(generation.Adam()), npu_keras_optimizer(generation.Adam())
    scaled = npu_keras_optimizer(generation.Adam(), manager())
    for optimizer in (plain, short, scaled):
        assert isinstance(optimizer, KerasDistributeOptimizer)
        assert isinstance(optimizer, generation.Optimizer)
        assert isinstance(optimizer, KerasLossScaling) == (optimizer is scaled)
    assert type(plain) is type(short)
    assert KerasDistributeOptimizer(generation.Adam(), name="mine").name == "mine"
    assert not isinstance(generation.Adam(), KerasDistributeOptimizer)


@EACH_GENERATION
@pytest.mark.parametrize("wrap", [npu_keras_optimizer, lambda opt: npu_keras_optimizer(opt, manager())])
def test_hyper_parameters_are_those_of_the_inner_optimizer(generation, wrap):
    inner = generation.Adam(0.5, beta_1=0.8, clipnorm=2.0)
    optimizer = wrap(inner)
    assert (float(optimizer.learning_rate), float(optimizer.lr)) == (0.5, 0.5)
    assert optimizer.clipnorm == 2.0
    assert optimizer.iterations is inner.iterations
    optimizer.learning_rate = 0.25
    assert float(inner.learning_rate) == 0.25
    optimizer.lr.assign(0.125)
    assert float(inner.learning_rate) == 0.125
    optimizer.beta_1 = 0.7
    assert float(optimizer.beta_1) == float(inner.beta_1) == np.float32(0.7) or inner.beta_1 == 0.7
    assert optimizer.inner_optimizer is inner
    assert not hasattr(optimizer, "no_such_thing")


@EACH_GENERATION
def test_stock_callbacks_act_on_it(generation, tmp_path):
    optimizer = npu_keras_optimizer(generation.SGD(0.5), manager())
    scheduler = tf.keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    plateau = tf.keras.callbacks.ReduceLROnPlateau(monitor="loss", factor=0.1, patience=0, min_delta=1e6)
    board = tf.keras.callbacks.TensorBoard(tmp_path, write_graph=False)
    model, _ = fit(optimizer, make_data(1), callbacks=[scheduler, plateau, board])
    assert float(optimizer.learning_rate) == 0.25  # the first epoch is the best one so far
    model.fit(*make_data(1), verbose=0, callbacks=[plateau, board], epochs=2)
    np.testing.assert_allclose(float(model.optimizer.learning_rate), 0.025)


@EACH_GENERATION
@pytest.mark.parametrize("make_manager", [lambda: None, manager, lambda: FixedLossScaleManager(8.0, False)])
def test_the_configuration_is_json_and_comes_back(generation, make_manager):
    optimizer = npu_keras_optimizer(
        generation.Adam(
            generation.schedules.ExponentialDecay(0.5, 10, 0.9) if generation is GENERATIONS["current"] else 0.5
        ),
        make_manager(),
        is_distributed=False,
    )
    config = json.loads(json.dumps(optimizer.get_config()))
    for face in (type(optimizer), KerasDistributeOptimizer):
        again = face.from_config(config)
        assert type(again) is type(optimizer)
        assert json.loads(json.dumps(again.get_config())) == config
        of_earlier_version = {name: value for name, value in config.items() if name != "checks_combined"}
        assert face.from_config(of_earlier_version).get_config() == again.get_config()
    serialized = json.loads(json.dumps(tf.keras.optimizers.serialize(optimizer)))
    assert type(tf.keras.optimizers.deserialize(serialized)) is type(optimizer)


class OwnManager(LossScaleManager):
    """A user's rule that says nothing about how it is saved; it notes the files of the functions that call it."""

    def get_loss_scale(self):
        self.callers = {frame.f_code.co_filename for frame, _ in traceback.walk_stack(sys._getframe(1))}
        return tf.constant(4.0)

    def update_loss_scale(self, finite_grads):
        return None if tf.executing_eagerly() else tf.no_op()


@EACH_GENERATION
def test_a_manager_of_ones_own_in_a_function_that_autograph_leaves_alone(generation):
    """A user's tf.function would translate it recursively, which takes half a minute and prints warnings."""
    own, variable = OwnManager(), tf.Variable(1.0)
    optimizer = npu_keras_optimizer(generation.SGD(0.5), own)
    optimizer.minimize(lambda: variable**2, [variable])
    assert variable.numpy() == 0.0
    assert not optimizer.dynamic
    with pytest.raises(TypeError, match="OwnManager"):
        optimizer.get_config()
    variable.assign(1.0)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = optimizer.get_scaled_loss(variable**2)
        optimizer.apply_gradients(zip(optimizer.get_unscaled_gradients([tape.gradient(loss, variable)]), [variable]))

    step()
    converted = [file for file in own.callers if "__autograph_generated_file" in file]
    assert len(converted) == 1 and shared.__file__ in own.callers  # the user's function alone
    assert variable.numpy() == 0.0


@EACH_GENERATION
def test_a_forgotten_call_is_told(generation, caplog):
    optimizer, variable = npu_keras_optimizer(generation.SGD(0.5), FixedLossScaleManager(8.0)), tf.Variable(1.0)
    with tf.GradientTape() as tape:
        loss = optimizer.get_scaled_loss(variable**2)
    with pytest.raises(ValueError, match="Expected get_unscaled_gradients after get_scaled_loss"):
        optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])
    optimizer.apply_gradients([(tf.constant(1.0), variable)])  # unscaled from elsewhere: used as they are
    assert variable.numpy() == 0.5


@EACH_GENERATION
def test_bad_arguments_are_refused(generation):
    adam, scaled = generation.Adam, lambda: npu_keras_optimizer(generation.Adam(), manager())
    cases = [
        (lambda: KerasDistributeOptimizer("adam"), TypeError, ["KerasDistributeOptimizer", "'adam'"]),
        (lambda: npu_keras_optimizer(tf1.train.AdamOptimizer()), TypeError, ["NPUDistributedOptimizer"]),
        (lambda: KerasDistributeOptimizer(adam(), momentum=1), TypeError, ["momentum"]),
        (lambda: KerasDistributeOptimizer(KerasDistributeOptimizer(adam())), ValueError, ["twice"]),
        (lambda: KerasDistributeOptimizer(KerasLossScaling(adam())), ValueError, ["outside"]),
        (lambda: KerasDistributeOptimizer(scaled()), ValueError, ["outside"]),
        (lambda: KerasDistributeOptimizer(npu_distributed_optimizer_wrapper(adam())), ValueError, ["twice"]),
        (lambda: NPUDistributedOptimizer(KerasDistributeOptimizer(adam())), ValueError, ["twice"]),
        (lambda: NPUOptimizer(npu_distributed_optimizer_wrapper(adam()), None, True), ValueError, ["twice"]),
        (lambda: npu_keras_optimizer(adam(), is_loss_scale=True), ValueError, ["npu_keras_optimizer", "None"]),
        (lambda: npu_keras_optimizer(adam(), 1024), TypeError, ["1024"]),
        (lambda: npu_distributed_optimizer_wrapper(3), TypeError, ["npu_distributed_optimizer_wrapper", "int"]),
        (lambda: npu_distributed_optimizer_wrapper("no such"), ValueError, ["no such"]),
    ]
    for make, error, parts in cases:
        with pytest.raises(error) as caught:
            make()
        assert all(part in str(caught.value) for part in parts), caught.value


@pytest.mark.parametrize("maker", [KerasDistributeOptimizer, NpuLossScaleOptimizer])
def test_nobody_derives_from_what_returns_an_optimizer_of_another_class(maker):
    name = maker.__name__
    with pytest.raises(TypeError, match=rf"Mine: {name}\(\.\.\.\) returns .* Derive from the Keras .* {name}\(Mine\("):
        type("Mine", (maker,), {})


@EACH_GENERATION
def test_keywords_of_the_keras_base_class_have_no_effect(generation, caplog):
    optimizer = KerasDistributeOptimizer(generation.SGD(0.5), clipnorm=1.0)
    assert optimizer.clipnorm is None
    assert "clipnorm has no effect here" in caplog.text


def test_wrapper_gives_the_same_object(caplog):
    for optimizer in (tf1.train.AdamOptimizer(), tf.keras.optimizers.Adam(), tf.keras.optimizers.legacy.Adam()):
        assert npu_distributed_optimizer_wrapper(optimizer) is optimizer
        assert not caplog.text
        assert npu_distributed_optimizer_wrapper(optimizer) is optimizer
        assert "already averages its gradients" in caplog.text
        caplog.clear()
    distributed = NPUDistributedOptimizer(tf1.train.AdamOptimizer())
    assert npu_distributed_optimizer_wrapper(distributed) is distributed
    assert "already" in caplog.text
    assert type(npu_distributed_optimizer_wrapper("adam")) is tf.keras.optimizers.Adam
    assert isinstance(npu_tf_optimizer(tf1.train.AdamOptimizer()), NPUDistributedOptimizer)


@EACH_GENERATION
def test_two_models_in_one_function(generation):
    """Each optimizer keeps its own open steps, and one optimizer keeps those of different variables apart."""
    first, second = tf.Variable(1.0), tf.Variable(2.0)
    optimizer = npu_keras_optimizer(generation.SGD(0.25), FixedLossScaleManager(8.0))
    if hasattr(optimizer, "build"):
        optimizer.build([first, second])
    compute = getattr(optimizer, "compute_gradients", None) or optimizer._compute_gradients

    @tf.function
    def step():
        one = compute(lambda: first**2, [first])
        other = compute(lambda: second**2, [second])
        optimizer.apply_gradients([(grad * 1.0, variable) for grad, variable in one])
        optimizer.apply_gradients(other)

    step()
    assert (first.numpy(), second.numpy()) == (0.5, 1.0)


SCHEDULE = tf.keras.optimizers.schedules.ExponentialDecay
RATES = {
    "numpy float32": lambda: np.float32(0.5),
    "numpy float64": lambda: np.float64(0.5),
    "array": lambda: np.array(0.5, np.float32),
    "tensor": lambda: tf.constant(0.5),
    "variable": lambda: tf.Variable(0.5),
    "schedule": lambda: SCHEDULE(np.float32(0.5), np.int64(10), np.float32(0.5)),
}
MADE_WITH_RATE = {
    "rule": optimizers.keras.SGD,
    "legacy rule": optimizers.keras_legacy.SGD,
    "group of a rule": lambda rate: optimizers.keras.SGD(0.1, groups=[{"match": ".", "lr": rate}]),
    "current": lambda rate: npu_keras_optimizer(tf.keras.optimizers.SGD(rate)),
    "legacy": lambda rate: npu_keras_optimizer(tf.keras.optimizers.legacy.SGD(rate)),
    "legacy with a scale": lambda rate: npu_keras_optimizer(tf.keras.optimizers.legacy.SGD(rate), manager()),
    "around a rule": lambda rate: npu_keras_optimizer(optimizers.keras.SGD(rate)),
    "NPUOptimizer": lambda rate: NPUOptimizer(tf.keras.optimizers.legacy.SGD(rate)),
}


WITH_EACH_RATE = ("rule", "legacy rule", "current", "legacy")  # the others are made of these
RATE_CASES = [(kind, rate) for kind in WITH_EACH_RATE for rate in RATES]
RATE_CASES += [(kind, "numpy float32") for kind in MADE_WITH_RATE if kind not in WITH_EACH_RATE]


@pytest.mark.parametrize("kind, rate", RATE_CASES)
def test_a_configuration_is_json_whatever_the_rate_is_given_as(kind, rate):
    """Before the first update and after it; and an optimizer made of it has the same rate."""
    optimizer = MADE_WITH_RATE[kind](RATES[rate]())
    first = json.loads(json.dumps(optimizer.get_config()))
    variable = tf.Variable([1.0])
    optimizer.apply_gradients([(tf.constant([1.0]), variable)])
    json.dumps(optimizer.get_config())
    np.testing.assert_array_equal(variable, [0.5])
    if kind != "NPUOptimizer":  # which hands on the configuration of the optimizer inside
        again = type(optimizer).from_config(first)
        again.apply_gradients([(tf.constant([1.0]), variable)])
        np.testing.assert_array_equal(variable, [0.0])


def test_an_optimizer_of_ours_inside_comes_back_from_an_older_file(tmp_path):
    """Keras has one of the same name."""
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(2,))])
    model.compile(npu_keras_optimizer(optimizers.keras.Adam(np.float32(0.5), fused=True)), "mse")
    model.save(tmp_path / "model.h5")
    inner = tf.keras.models.load_model(tmp_path / "model.h5").optimizer._optimizer
    assert type(inner) is optimizers.keras.Adam and inner.get_config()["fused"]


def test_overlapping_steps_are_refused_in_one_sentence(caplog, monkeypatch):
    for switch, told in (("0", ""), ("", ""), ("1", "they run one by one.")):
        monkeypatch.setenv("NPU_OVERLAPPED_STEPS", switch)
        say_once.cache_clear()
        caplog.clear()
        npu_keras_optimizer(tf.keras.optimizers.SGD(0.1))
        assert told in caplog.text if told else not caplog.text
        assert caplog.text.count("\n") == bool(told)


@pytest.mark.parametrize("kind", [tf.keras.optimizers.SGD, tf.keras.optimizers.legacy.SGD])
def test_loss_scaling_of_keras_is_refused_around_stages(kind):
    """It would skip and update without them; around the all-reduce alone it is right."""
    with pytest.raises(ValueError, match="Pass a loss_scale_manager to npu_keras_optimizer"):
        tf.keras.mixed_precision.LossScaleOptimizer(npu_keras_optimizer(kind(0.1), stages=[ClipByGlobalNorm(1.0)]))
    assert tf.keras.mixed_precision.LossScaleOptimizer(npu_keras_optimizer(kind(0.1))).initial_scale == 2**15
