"""One process: optimizers of Keras 3 with a pipeline beside bare ones and beside Keras' own loss scaling."""

from __future__ import annotations

import json
import os

import keras
import numpy as np
import pytest
import tensorflow as tf

import npu_device
from npu_bridge import amp, boost
from npu_bridge.amp import DynamicLossScaleManager, GroupLossScaleManager, scale_boundary
from npu_bridge.base.tf_internals import keras3
from npu_bridge.estimator.npu.npu_helpers import npu_keras_optimizer
from npu_bridge.estimator.npu.npu_loss_scale_manager import FixedLossScaleManager
from npu_bridge.estimator.npu.npu_optimizer import (
    KerasDistributeOptimizer,
    NPUDistributedOptimizer,
    NPUOptimizer,
    npu_distributed_optimizer_wrapper,
)
from npu_bridge.gradients import AllReduce
from npu_bridge.gradients.explanation import list_pipelines
from npu_bridge.gradients.graph_mode import assign_constrained
from npu_bridge.stages import Accumulate, CentralizeGradients, ClipByGlobalNorm, Freeze, FreezeSchedule, pipeline
from tests.goldens.keras3_models import OPTIMIZERS, Trace, beside_keras3, dynamic, fit, loop, make_model, state_of
from tests.goldens.keras_models import make_data
from tests.goldens.two_layers import assert_same_bits

pytestmark = beside_keras3


def sgd(rate=0.05):
    return keras.optimizers.SGD(rate, momentum=0.9)


def fixed(optimizer, **arguments):
    return npu_keras_optimizer(optimizer, FixedLossScaleManager(2.0**7), **arguments)


WRAPPERS = {"distributed": KerasDistributeOptimizer, "fixed": fixed, "dynamic": dynamic}


@pytest.fixture
def mixed_float16():
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy("float32")


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fit_gives_the_bits_of_the_bare_optimizer(name, wrapper):
    """With moving averages, constraints, sparse gradients, clipping, and Keras' own accumulation."""
    bare, losses = fit(OPTIMIZERS[name](), make_data(6))
    wrapped, same_losses = fit(WRAPPERS[wrapper](OPTIMIZERS[name]()), make_data(6))
    assert_same_bits(state_of(wrapped), state_of(bare))
    assert same_losses == losses
    assert int(wrapped.optimizer.iterations) == int(bare.optimizer.iterations)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("decorate", [tf.function, lambda function: function], ids=["function", "eager"])
def test_a_loop_of_ones_own_gives_the_bits_of_the_bare_optimizer(decorate, wrapper):
    bare = state_of(loop(OPTIMIZERS["sgd"](), make_data(4), decorate))
    assert_same_bits(state_of(loop(WRAPPERS[wrapper](OPTIMIZERS["sgd"]()), make_data(4), decorate)), bare)


def test_gradients_of_an_unscaled_loss_are_taken_as_they_are(caplog):
    bare = state_of(loop(sgd(), make_data(3), scales=False))
    assert_same_bits(state_of(loop(dynamic(sgd()), make_data(3), scales=False)), bare)
    assert "the loss was not scaled" in caplog.text


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_gradients_may_be_arrays_and_variables(wrapper):
    updated = []
    for optimizer in (keras.optimizers.Adam(0.5), WRAPPERS[wrapper](keras.optimizers.Adam(0.5))):
        variables = [keras.Variable([[1.0, 2.0], [3.0, 4.0]]) for _ in range(3)]
        for gradient in (np.array([[0.5, 0.25], [1.0, -1.0]]), keras.Variable([[0.5, 1.0], [2.0, 3.0]])):
            optimizer.apply([gradient, tf.IndexedSlices(np.ones([1, 2], np.float32), [1], (2, 2)), None], variables)
        updated.append([variable.numpy() for variable in variables])
    np.testing.assert_array_equal(updated[1], updated[0])


def test_a_number_can_be_scaled():
    assert float(dynamic(sgd(), init=8.0).scale_loss(2.0)) == 16.0


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_weights_are_set_once_it_is_built(wrapper):
    first, second = (WRAPPERS[wrapper](keras.optimizers.Adam()) for _ in range(2))
    variable = keras.Variable([[1.0, 2.0], [3.0, 4.0]])
    first.apply([np.ones([2, 2])], [variable])
    with pytest.raises(ValueError, match="has not yet been built"):
        second.set_weights(first.variables)
    second.build([variable])
    second.set_weights(first.variables)
    np.testing.assert_equal([each.numpy() for each in second.variables], [each.numpy() for each in first.variables])


def test_slots_can_start_as_the_weights_that_fit_makes():
    """Of a model without an input, the weights are made in the function of the first batch."""
    trained = []
    for wrap in (lambda optimizer: optimizer, npu_keras_optimizer):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.Dense(2)])
        model.compile(wrap(keras.optimizers.ScheduleFreeAdamW(0.01)), loss="mse")
        model.fit(np.ones([8, 3]), np.zeros([8, 2]), batch_size=4, epochs=2, verbose=0)
        trained.append(model.get_weights())
    np.testing.assert_equal(trained[1], trained[0])


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_the_loss_scale_moves_as_keras_own_does(run_eagerly):
    """Eighteen batches, of which some overflow: the same scales, updates, weights and slots after each."""
    data = make_data(18, poisoned=[0, 5, 6, 13])

    def read(optimizer):
        scale = optimizer.dynamic_scale if hasattr(optimizer, "dynamic_scale") else optimizer.loss_scale
        weights = [variable.numpy().tobytes() for variable in optimizer.inner_optimizer.variables]
        return float(scale), int(optimizer.iterations), weights

    peer, ours = Trace(read), Trace(read)
    stock = keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=2.0**10, dynamic_growth_steps=3)
    fit(stock, data, callbacks=[peer], run_eagerly=run_eagerly)
    model, _ = fit(dynamic(sgd()), data, callbacks=[ours], run_eagerly=run_eagerly)
    assert ours.values == peer.values
    assert {scale for scale, *_ in ours.values} == {256.0, 512.0, 1024.0}
    assert int(model.optimizer.skipped_steps) == 4 and not bool(model.optimizer.last_step_skipped)
    assert int(model.optimizer.iterations) == 14


def test_the_loss_is_multiplied_and_shown_as_it_is(caplog):
    optimizer, variable = dynamic(sgd()), keras.Variable(3.0)
    with tf.GradientTape() as tape:
        loss = optimizer.scale_loss(variable.value**2)
    assert float(loss) == 9.0 * 2.0**10 and float(tape.gradient(loss, variable)) == 6.0 * 2.0**10
    fit(dynamic(sgd()), make_data(1))
    assert "the loss was not scaled" not in caplog.text


def test_a_skipped_step_changes_nothing_but_the_scale():
    model, _ = fit(dynamic(OPTIMIZERS["adam"]()), make_data(2))
    before, scale = state_of(model), float(model.optimizer.loss_scale)
    fit(model.optimizer, make_data(1, poisoned=[0]), model)
    assert_same_bits(state_of(model), before)
    assert float(model.optimizer.loss_scale) == scale / 2
    assert bool(model.optimizer.last_step_skipped)


@pytest.mark.usefixtures("mixed_float16")
def test_keras_adds_no_second_loss_scaling():
    ours = dynamic(sgd())
    model, _ = fit(ours, make_data(3))
    assert model.optimizer is ours
    peer, _ = fit(keras.optimizers.LossScaleOptimizer(sgd(), 2.0**10, 3), make_data(3))
    assert_same_bits(state_of(model), state_of(peer))
    with pytest.raises(ValueError, match="KerasDistributeOptimizer: loss scaling must be outside .*auto_scale_loss"):
        make_model().compile(KerasDistributeOptimizer(sgd()), "mse")
    make_model().compile(KerasDistributeOptimizer(sgd()), "mse", auto_scale_loss=False)


def test_what_is_refused():
    stock = keras.optimizers.LossScaleOptimizer
    cases = [
        (lambda: KerasDistributeOptimizer(stock(sgd())), ValueError, "loss scaling must be outside the reduction"),
        (lambda: npu_keras_optimizer(keras.optimizers.SGD(loss_scale_factor=8.0)), ValueError, "happen once"),
        (lambda: stock(KerasDistributeOptimizer(sgd())), ValueError, "loss scaling must be outside the reduction"),
        (lambda: stock(dynamic(sgd())), ValueError, "happen once"),
        (lambda: KerasDistributeOptimizer(KerasDistributeOptimizer(sgd())), ValueError, "twice"),
        (lambda: KerasDistributeOptimizer(dynamic(sgd())), ValueError, "outside"),
        (lambda: NPUOptimizer(sgd()), TypeError, "npu_keras_optimizer"),
        (lambda: NPUDistributedOptimizer(sgd()), TypeError, "npu_keras_optimizer"),
        (lambda: npu_distributed_optimizer_wrapper(sgd()), TypeError, "KerasDistributeOptimizer(...)"),
        (lambda: npu_keras_optimizer(keras.optimizers.SGD), TypeError, "not a Keras optimizer"),
        (lambda: dynamic(sgd()).apply([tf.constant(1.0)]), ValueError, "as many variables as gradients"),
    ]
    for make, error, part in cases:
        with pytest.raises(error) as caught:
            make()
        assert part in str(caught.value) and "\n" not in str(caught.value), caught.value


def test_float8_is_refused():
    model = keras.Sequential([keras.layers.Input([4]), keras.layers.Dense(4)])
    model.quantize("float8")
    with pytest.raises(ValueError, match="float8"):
        dynamic(sgd()).build(model.trainable_variables)


def test_a_scale_that_may_have_moved_is_refused():
    """An eagerly scaled loss would be divided by the scale of the step in which the function was traced."""
    optimizer, variable = dynamic(keras.optimizers.SGD(0.5)), keras.Variable(1.0)
    with tf.GradientTape() as tape:
        loss = optimizer.scale_loss(variable.value**2)
    gradient = tape.gradient(loss, variable)
    with pytest.raises(ValueError, match="in different functions"):
        tf.function(lambda: optimizer.apply([gradient], [variable]))()
    optimizer.apply([gradient], [variable])
    assert float(variable) == 0.0


def test_it_may_be_applied_in_a_branch_of_the_function():
    optimizer, variable = dynamic(keras.optimizers.SGD(0.25)), keras.Variable(1.0)
    optimizer.build([variable])

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(variable.value**2)
        gradient = tape.gradient(loss, variable)
        tf.cond(variable.value > 0.0, lambda: [optimizer.apply([gradient], [variable]), True][1], lambda: False)

    step()
    step()
    assert float(variable) == 0.25


@pytest.mark.parametrize("decorate", [tf.function, lambda function: function], ids=["function", "eager"])
@pytest.mark.parametrize("case", ["one loss, halves", "two losses, halves", "two losses, all variables"])
def test_every_apply_divides_by_the_scale_of_its_loss(case, decorate, caplog):
    optimizer, pair = fixed(keras.optimizers.SGD(0.5)), [keras.Variable(1.0), keras.Variable(1.0)]
    optimizer.build(pair)

    @decorate
    def step():
        with tf.GradientTape(persistent=True) as tape:
            losses = [optimizer.scale_loss(pair[0].value * 0.25 + pair[1].value * 0.5) for _ in range(2)]
        losses = losses[:1] * 2 if case == "one loss, halves" else losses
        for loss, variables in zip(losses, ([pair[:1], pair[1:]] if "halves" in case else [pair, pair])):
            optimizer.apply(tape.gradient(loss, variables), variables)

    step()
    step()
    assert list(map(float, pair)) == ([0.75, 0.5] if "halves" in case else [0.5, 0.0])
    assert "not scaled" not in caplog.text


def test_eager_gradients_without_scale_loss_are_unscaled_after_scaled_ones():
    optimizer, variable = fixed(keras.optimizers.SGD(0.5)), keras.Variable(1.0)
    optimizer.scale_loss(1.0)
    for scale in (2.0**7, 1.0):
        optimizer.apply([0.5 * scale], [variable])
    assert float(variable) == 0.5


def test_clipping_between_unscaling_and_the_update():
    def step(optimizer, variable):
        with tf.GradientTape() as tape:
            loss = optimizer.get_scaled_loss(tf.reduce_sum(variable.value**2))
        gradients = optimizer.get_unscaled_gradients(tape.gradient(loss, [variable]))
        optimizer.apply(tf.clip_by_global_norm(gradients, 1.0)[0], [variable])

    variable = keras.Variable([3.0, 4.0])
    step(fixed(keras.optimizers.SGD(1.0)), variable)
    np.testing.assert_allclose(variable, [2.4, 3.2], rtol=1e-6)


def test_another_backend_is_refused(monkeypatch):
    """As jax would say it, without which Keras does not begin with another backend."""
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(ValueError, match="library. Expected KERAS_BACKEND=tensorflow; got KERAS_BACKEND=jax."):
        npu_keras_optimizer(sgd())


def test_hyper_parameters_and_stock_callbacks_act_on_the_inner_optimizer(tmp_path):
    inner = keras.optimizers.Adam(0.5, beta_1=0.8, clipnorm=2.0)
    optimizer = dynamic(inner)
    assert optimizer.clipnorm == 2.0 and optimizer.iterations is inner.iterations
    optimizer.beta_1 = 0.7
    assert inner.beta_1 == 0.7 and optimizer.inner_optimizer is inner
    assert not hasattr(optimizer, "no_such_thing")
    callbacks = [
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: float(rate) / 2),
        keras.callbacks.ReduceLROnPlateau(monitor="loss", factor=0.1, patience=0, min_delta=1e6),
        keras.callbacks.EarlyStopping("loss", patience=100),
        keras.callbacks.ModelCheckpoint(str(tmp_path / "best.keras"), monitor="loss", save_best_only=True),
    ]
    model, _ = fit(optimizer, make_data(1), callbacks=callbacks)
    assert float(inner.learning_rate) == 0.25
    assert (tmp_path / "best.keras").exists()
    model.summary(print_fn=lambda text: None)
    assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    assert isinstance(optimizer, KerasDistributeOptimizer)
    assert not isinstance(KerasDistributeOptimizer(sgd()), keras.optimizers.LossScaleOptimizer)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)
    model, _ = fit(dynamic(keras.optimizers.SGD(schedule)), make_data(2, poisoned=[0]))
    assert float(model.optimizer.learning_rate) == 0.25  # a skipped step does not count


def test_moving_averages_end_a_training_in_16_bits():
    keras.config.set_dtype_policy("bfloat16")
    try:
        model, _ = fit(npu_keras_optimizer(keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.0)), make_data(3))
    finally:
        keras.config.set_dtype_policy("float32")
    averages = [variable for variable in model.optimizer.variables if "average" in variable.path]
    for variable, average in zip(model.trainable_variables, averages):
        assert tf.reduce_all(variable.value == tf.cast(average.value, variable.dtype))
    assert "bfloat16" in {variable.dtype for variable in model.trainable_variables}


def test_moving_averages_can_be_swapped_in():
    for wrap in (lambda opt: opt, dynamic):
        swap = keras.callbacks.SwapEMAWeights()
        model, _ = fit(wrap(keras.optimizers.SGD(0.5, use_ema=True)), make_data(3), callbacks=[swap])
        state = state_of(model)
        assert_same_bits(state, locals().get("first", state))
        first = state  # noqa: F841 - read in the second round


@pytest.mark.parametrize("make", [OPTIMIZERS["sgd"], lambda: keras.optimizers.SGD(SCHEDULE())], ids=["sgd", "schedule"])
def test_the_configuration_is_json_and_comes_back(make):
    stages = [Accumulate(2), ClipByGlobalNorm(1.0)]
    optimizer = dynamic(make(), is_distributed=False, stages=stages, wire="bfloat16")
    config = json.loads(json.dumps(optimizer.get_config()))
    for face in (type(optimizer), KerasDistributeOptimizer):
        again = face.from_config(config)
        assert type(again) is type(optimizer)
        assert json.loads(json.dumps(again.get_config())) == config
    serialized = json.loads(json.dumps(keras.optimizers.serialize(optimizer)))
    assert repr(keras.optimizers.deserialize(serialized)) == repr(optimizer)


def SCHEDULE():
    return keras.optimizers.schedules.ExponentialDecay(0.5, 10, 0.5)


def save_and_load(model, path, way):
    """The model as another process would have it."""
    if way == "keras":
        model.save(path / "model.keras")
        return keras.models.load_model(path / "model.keras")
    fresh = make_model()
    fresh.compile(type(model.optimizer).from_config(model.optimizer.get_config()), "mse")
    fresh.optimizer.build(fresh.trainable_variables)
    saved = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(str(path / "checkpoint"))
    tf.train.Checkpoint(model=fresh, optimizer=fresh.optimizer).restore(saved).assert_existing_objects_matched()
    return fresh


@pytest.mark.parametrize("way", ["keras", "checkpoint"])
@pytest.mark.parametrize("stages", [(), (Accumulate(2), CentralizeGradients())], ids=["plain", "stages"])
def test_a_loaded_model_goes_on_where_the_saved_one_stopped(way, stages, tmp_path):
    """In the middle of a window, with a scale that has moved, and counters."""
    first, rest = make_data(7, poisoned=[2, 3]), make_data(6)
    model, _ = fit(dynamic(OPTIMIZERS["adam"](), stages=stages), first)
    loaded = save_and_load(model, tmp_path, way)
    for name in ("loss_scale", "skipped_steps", "iterations"):
        assert float(getattr(loaded.optimizer, name)) == float(getattr(model.optimizer, name)) != 0.0, name
    for each in (model, loaded):
        each.fit(*rest, batch_size=8, shuffle=False, verbose=0)
    assert_same_bits(state_of(loaded), state_of(model))
    own = [variable.numpy() for variable in model.optimizer.variables]
    assert [variable.numpy().tolist() for variable in loaded.optimizer.variables] == [each.tolist() for each in own]


def test_a_file_of_other_stages_or_of_the_bare_optimizer_is_read_where_it_fits(tmp_path, caplog):
    model, _ = fit(dynamic(sgd()), make_data(3))
    model.save(tmp_path / "model.keras")
    bare = fit(sgd(), make_data(3))[0]
    bare.save(tmp_path / "bare.keras")
    for name in ("model", "bare"):
        fresh = make_model()
        fresh.compile(dynamic(sgd(), stages=[Accumulate(2)]), "mse")
        fresh.optimizer.build(fresh.trainable_variables)
        fresh.load_weights(tmp_path / f"{name}.keras")
        assert int(fresh.optimizer.iterations) == 3
        assert_same_bits(state_of(fresh), state_of(model))
        assert float(fresh.optimizer.loss_scale) == (2048.0 if name == "model" else 1024.0)
    assert "missing in the checkpoint" in caplog.text
    fresh.compile(dynamic(keras.optimizers.SGD()), "mse")
    fresh.optimizer.build(fresh.trainable_variables)
    with pytest.raises(
        ValueError,
        match="saved with another optimizer. Expected the 7 variables of this optimizer; got 7 other variables",
    ):
        fresh.load_weights(tmp_path / "bare.keras")


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_file_is_loaded_whole_into_an_optimizer_or_not_at_all(wrapper, tmp_path, caplog):
    """Not the count of steps without the slots, into one that is not built; and of no step, into one that has slots."""
    path = tmp_path / "model.weights.h5"
    model = make_model()
    model.compile(WRAPPERS[wrapper](keras.optimizers.Adam()), "mse")
    model.save_weights(path)
    model.fit(*make_data(3), batch_size=8, verbose=0)
    model.load_weights(path)
    assert int(model.optimizer.iterations) == 3 and "the file has no slots" in caplog.text
    model.save_weights(path)
    fresh = make_model()
    fresh.compile(WRAPPERS[wrapper](keras.optimizers.Adam()), "mse")
    fresh.load_weights(path)
    assert int(fresh.optimizer.iterations) == 0 and "it is not built" in caplog.text
    fresh.optimizer.build(fresh.trainable_variables)
    fresh.load_weights(path)
    assert_same_bits(state_of(fresh), state_of(model))
    assert int(fresh.optimizer.iterations) == 3


def test_an_optimizer_without_slots_loads_its_counts(tmp_path):
    model, _ = fit(dynamic(keras.optimizers.SGD(0.1)), make_data(3))
    model.save_weights(tmp_path / "model.weights.h5")
    fresh = make_model()
    fresh.compile(dynamic(keras.optimizers.SGD(0.1)), "mse")
    fresh.optimizer.build(fresh.trainable_variables)
    fresh.load_weights(tmp_path / "model.weights.h5")
    assert int(fresh.optimizer.iterations) == 3 and float(fresh.optimizer.loss_scale) == 2048.0


def test_the_bare_optimizer_reads_the_file_of_one_that_keeps_no_state(tmp_path):
    model, _ = fit(KerasDistributeOptimizer(sgd()), make_data(3))
    model.save_weights(tmp_path / "model.weights.h5")
    bare = make_model()
    bare.compile(sgd(), "mse")
    bare.optimizer.build(bare.trainable_variables)
    bare.load_weights(tmp_path / "model.weights.h5")
    assert_same_bits(state_of(bare), state_of(model))


@pytest.mark.parametrize("make", [sgd, lambda: keras.optimizers.Muon(0.05)], ids=["sgd", "muon"])
def test_gradients_alone_update_variables_of_16_bits(make):
    variable = keras.Variable([[1.0, 2.0], [3.0, 4.0]], dtype="bfloat16", name="kernel")
    optimizer = npu_keras_optimizer(make())
    optimizer.build([variable])
    optimizer.apply([tf.ones([2, 2], tf.bfloat16)])
    assert float(variable[0, 0]) < 1.0


def test_each_of_two_variables_of_one_name_has_its_slot():
    variables = [tf.Variable([1.0]), tf.Variable([2.0, 3.0])]
    optimizer = npu_keras_optimizer(keras.optimizers.Adam())
    optimizer.apply([tf.constant([0.5]), tf.constant([0.25, 0.125])], variables)
    slots = [optimizer._pipeline.inner._slot(variable, "momentum").numpy() for variable in variables]
    np.testing.assert_allclose(np.concatenate(slots), np.array([0.5, 0.25, 0.125]) * 0.1, rtol=1e-6)


def test_stages_that_combine_weights_see_constraints():
    variable = keras.Variable([3.0, 4.0])
    variable.constraint = keras.constraints.UnitNorm()
    optimizer = npu_keras_optimizer(sgd())
    optimizer.build([variable])
    assert np.linalg.norm(assign_constrained(variable.value, tf.constant([3.0, 4.0])).numpy()) == pytest.approx(1.0)


def test_parts_to_freeze_are_lists_of_variables():
    model, data = make_model(), make_data(2)
    layers = [layer.trainable_variables for layer in model.layers if layer.trainable_variables]
    schedule = FreezeSchedule(groups=layers, kind="explicit", sequence=[len(layers) - 1])
    before = [variable.numpy() for variable in model.trainable_variables]
    fit(npu_keras_optimizer(sgd(), stages=[Freeze(schedule)]), data, model)
    moved = [not np.array_equal(one, other) for one, other in zip(before, model.trainable_variables)]
    assert moved == [variable.path in {each.path for each in layers[-1]} for variable in model.trainable_variables]


def test_an_optimizer_that_was_built_before_is_wrapped_with_its_slots():
    model, inner = make_model(), sgd()
    inner.build(model.trainable_variables)
    slots = len(inner.variables)
    optimizer = dynamic(inner, stages=[Accumulate(2)])
    made = len(optimizer.variables)
    trained, _ = fit(optimizer, make_data(4), model)
    assert len(inner.variables) == slots
    fresh, _ = fit(dynamic(sgd(), stages=[Accumulate(2)]), make_data(4))
    assert_same_bits(state_of(trained), state_of(fresh))
    assert made == len(optimizer.variables) == len(fresh.optimizer.variables)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_variables_of_16_bits_are_updated_in_float32(dtype):
    """Each update is too small for 16 bits; and a constraint holds."""
    variables = [keras.Variable([1.0], dtype=dtype, name="one"), keras.Variable([2.0**-9], dtype=dtype, name="small")]
    variables[1].constraint = keras.constraints.NonNeg()
    optimizer = fixed(keras.optimizers.SGD(2.0**-13))
    optimizer.build(variables)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.add_n([tf.cast(variable.value[0], tf.float32) for variable in variables]))
        optimizer.apply(tape.gradient(loss, variables), variables)

    for _ in range(64):
        step()
    assert [float(variable[0]) for variable in variables] == [1.0 - 2.0**-7, 0.0]
    assert {variable.dtype for variable in variables} == {dtype}
    assert [str(kept.dtype) for kept in optimizer.variables[-2:]] == ["float32"] * 2


def test_accumulation_over_batches_is_the_update_of_the_mean():
    """Of two batches of four; and Keras may not put several batches into one step besides."""
    whole, _ = fit(sgd(), make_data(3))
    halves, _ = fit(npu_keras_optimizer(sgd(), stages=[Accumulate(2)]), make_data(3), batch_size=4)
    assert int(halves.optimizer.iterations) == 3
    for value, expected in zip(state_of(halves).values(), state_of(whole).values()):
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-6)
    with pytest.raises(RuntimeError, match="steps_per_execution=1; got steps_per_execution=2"):
        fit(npu_keras_optimizer(sgd(), stages=[Accumulate(2)]), make_data(2), steps_per_execution=2)
    several, _ = fit(dynamic(sgd()), make_data(3), steps_per_execution=3)
    assert_same_bits(state_of(several), state_of(fit(dynamic(sgd()), make_data(3))[0]))


_IMPORTS = ("import keras", "from keras")


def test_only_two_modules_load_keras_3():
    """And they are imported when other code has loaded it."""
    root = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(__file__))), "npu_bridge")
    found = []
    for folder, _, files in os.walk(root):
        for name in files:
            if name.endswith(".py"):
                with open(os.path.join(folder, name), encoding="utf-8") as file:
                    if any("keras3.load_keras3(__name__)" in line or line.startswith(_IMPORTS) for line in file):
                        found.append(os.path.relpath(os.path.join(folder, name), root))
    assert sorted(found) == ["gradients/keras/keras3.py", "optimizers/keras3_optimizer.py"]
    assert keras3.loaded_keras3() is keras


def test_groups_of_loss_scales_are_layers_and_variables():
    model = make_model()
    members = [[*model.layers[:2], model.layers[2].kernel, model.layers[2].bias], model.layers[3]]
    manager = GroupLossScaleManager(members, init=2.0**12, growth_factor=2.0)
    bounded = keras.Sequential([model, keras.layers.Lambda(lambda outputs: scale_boundary(outputs, 2, 0, manager))])
    bounded, _ = fit(npu_keras_optimizer(sgd(), manager), make_data(1), bounded)
    assert bounded.optimizer.loss_scale.numpy().tolist() == [2.0**13] * 2


@pytest.mark.parametrize("stages", [(), (Accumulate(2),)], ids=["plain", "accumulate"])
@pytest.mark.parametrize("decorate", [tf.function, lambda function: function], ids=["function", "eager"])
def test_passes_of_scale_loss_train_the_variables_of_a_model(decorate, stages, caplog):
    """Clipped, as `unscaled_gradients` is for; two losses, of which one overflows at first."""
    managers = [DynamicLossScaleManager.apex(2.0**4, scale_window=100), DynamicLossScaleManager.apex(2.0**4)]
    model = keras.Sequential(
        [keras.layers.Input([2]), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")]
    )
    optimizer = npu_keras_optimizer(keras.optimizers.SGD(0.5), managers, stages=stages)
    optimizer.build(model.trainable_variables)

    @decorate
    def step(factor):
        for position in range(2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(tf.ones([1, 2]))) * (factor if position else 1.0)
            with amp.scale_loss(loss, optimizer, loss_id=position) as scaled:
                scaled.backward(tape, model.trainable_variables)
        pairs = [(tf.clip_by_value(grad, -1.0, 1.0), variable) for grad, variable in amp.unscaled_gradients(optimizer)]
        optimizer.apply_gradients(pairs)

    for factor in (np.inf, np.inf, 1.0, 1.0):
        step(tf.constant(factor))
    scales = [float(manager.get_loss_scale()) for manager in managers]
    assert scales[0] == 16.0 and scales[1] < 16.0 and "the loss was not scaled" not in caplog.text
    updates = 1 if stages else 2
    assert model.get_weights()[0].tolist() == [[1.0 - 0.5 * updates]] * 2


def test_a_pipeline_of_a_loop_names_the_way_for_variables_of_keras_3():
    made, variable = pipeline("mine"), keras.Variable(1.0, name="kernel")
    with pytest.raises(TypeError, match=r"Pipeline.combine: .* the keras.Variable kernel\. Use npu_keras_optimizer"):
        made.combine(made.begin(), [(tf.constant(1.0), variable)])
    made.combine(made.begin(), [(tf.constant(1.0), variable.value)])


@pytest.mark.parametrize(
    "make",
    [
        lambda opt: npu_keras_optimizer(opt, stages=[Freeze(FreezeSchedule(2))]),
        npu_device.train.optimizer.NpuLossScaleOptimizer,
    ],
    ids=["freeze", "counts"],
)
def test_accumulation_of_keras_is_refused_where_updates_are_told_apart(make):
    with pytest.raises(ValueError, match=r"got gradient_accumulation_steps=4. .* the stage Accumulate\(4\)"):
        make(keras.optimizers.Adam(gradient_accumulation_steps=4))


@pytest.mark.parametrize("part", [{"model": make_model}, {"optimizer": sgd}])
def test_levels_name_the_policy_for_keras_3(part):
    with pytest.raises(TypeError, match="Call keras.mixed_precision.set_global_policy .* npu_keras_optimizer with"):
        amp.configure("O1", **{name: make() for name, make in part.items()})


def test_boost_takes_optimizers_and_asks_for_that_of_a_model():
    with pytest.raises(TypeError, match=r"got <Sequential.*Pass the optimizer of the model\."):
        boost.apply(make_model())
    settings = {"boost": {"mode": "manual", "grad_freeze": True}, "grad_freeze": {"param_groups": 2}}
    boosted, _ = fit(boost.apply(sgd(), config=settings), make_data(3))
    assert [type(stage) for stage in list_pipelines(boosted.optimizer)[0].stages] == [Freeze, AllReduce]
