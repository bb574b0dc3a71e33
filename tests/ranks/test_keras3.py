"""Keras 3 on several real ranks: they train as one process with the whole batch would, and agree on every step."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import npu_device
from npu_bridge import collective
from npu_bridge.base import errors
from npu_bridge.collective.checks import exchanges
from npu_bridge.estimator.npu.npu_callbacks import NPUBroadcastGlobalVariablesCallback
from npu_bridge.estimator.npu.npu_helpers import npu_callbacks_append, npu_keras_optimizer
from npu_bridge.estimator.npu.npu_loss_scale_manager import FixedLossScaleManager
from npu_bridge.estimator.npu.npu_optimizer import KerasDistributeOptimizer
from npu_bridge.hccl import hccl_ops
from npu_bridge.session import EndTogetherCallback
from npu_bridge.stages import (
    Accumulate,
    Adasum,
    CentralizeGradients,
    ClipByGlobalNorm,
    Freeze,
    FreezeSchedule,
    PartialSync,
    Threshold,
    TopK,
    sync_all,
)
from tests.goldens.keras3_models import Trace, beside_keras3, dynamic, fit, loop, make_model, state_of
from tests.goldens.keras_models import BATCH_SIZE, make_data
from tests.goldens.two_layers import assert_same_bits
from tests.once import lines_said
from tests.ranks.test_keras import STEPS, assert_trained_as, share_of, transfers_of

pytestmark = beside_keras3


def fixed(optimizer, **arguments):
    return npu_keras_optimizer(optimizer, FixedLossScaleManager(2.0**7), **arguments)


WRAPPERS = {
    "bare": lambda opt: opt,
    "distributed": KerasDistributeOptimizer,
    "scaled": fixed,
    "tailed": lambda opt: fixed(opt, is_tailing_optimization=True, gradient_split_groups=[3]),
    "dynamic": dynamic,
    "combined": lambda opt: fixed(opt, combine_grad=True),
    "float16": lambda opt: fixed(opt, wire="float16"),
}
WAYS = {
    "fit": lambda opt, data, size: fit(opt, data, batch_size=size)[0],
    "loop": lambda opt, data, size: loop(opt, data, batch_size=size),
    "eager loop": lambda opt, data, size: loop(opt, data, lambda function: function, batch_size=size),
}


def momentum():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def trained(wrapper, way):
    return state_of(WAYS[way](WRAPPERS[wrapper](momentum()), *share_of(make_data(STEPS))))


def trained_all(way):
    return {wrapper: trained(wrapper, way) for wrapper in WRAPPERS if wrapper != "bare"}


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_equal_one_process_with_the_whole_batch(on_ranks, way):
    """With an embedding, whose gradients are sparse."""
    alone = trained("bare", way)
    first, second = on_ranks(2, trained_all, way)
    assert_trained_as(alone, first, second)
    assert_same_bits(first["tailed"], first["scaled"])
    assert_same_bits(first["combined"], first["scaled"])
    assert any(value.tobytes() != first["scaled"][key].tobytes() for key, value in first["float16"].items())


def one_linear_layer(stages):
    """Returns, on a rank, the weights after each of four batches of one row; numpy can compute their gradients."""
    rank = collective.current().rank
    model = keras.Sequential([keras.layers.Input([2]), keras.layers.Dense(1, use_bias=False)])
    model.set_weights([np.float32([[0.5], [-0.25]])])
    model.compile(dynamic(keras.optimizers.SGD(0.5), stages=stages), loss="mse")
    weights = Trace(lambda optimizer: model.get_weights()[0][:, 0].tolist())
    x, y = rows_of(rank)
    model.fit(x, y, batch_size=1, shuffle=False, verbose=0, callbacks=[weights])
    return weights.values


def rows_of(rank):
    random = np.random.RandomState(rank)
    return random.randint(-4, 5, [4, 2]).astype(np.float32) / 8, random.randint(-4, 5, [4, 1]).astype(np.float32) / 8


def test_updates_are_what_numpy_makes_of_the_mean(on_ranks):
    weights, expected = np.array([0.5, -0.25]), []
    for step in range(4):
        gradients = []
        for x, y in map(rows_of, range(2)):
            gradients.append(2 * (x[step] @ weights - y[step, 0]) * x[step])
        mean = np.mean(gradients, axis=0)
        weights = weights - 0.5 * mean * min(1.0, 0.1 / np.linalg.norm(mean))
        expected.append(weights)
    for values in on_ranks(2, one_linear_layer, (ClipByGlobalNorm(0.1),)):
        np.testing.assert_allclose(values, expected, rtol=1e-6)


def overflow_on_rank_1(way):
    """On a rank: what is left of six batches of which rank 1 cannot use the third."""
    data = make_data(6, poisoned=[2] if collective.current().rank == 1 else [])
    model = WAYS[way](dynamic(momentum()), data, BATCH_SIZE)
    optimizer = model.optimizer
    return state_of(model), int(optimizer.iterations), float(optimizer.loss_scale), int(optimizer.skipped_steps)


@pytest.mark.parametrize("way", ["fit", "eager loop"])
def test_an_overflow_on_one_rank_skips_the_step_on_both(on_ranks, way):
    first, second = on_ranks(2, overflow_on_rank_1, way)
    assert_same_bits(second[0], first[0])
    assert all(np.all(np.isfinite(value)) for value in first[0].values())
    assert second[1:] == first[1:] == (5, 1024.0, 1)


def started_differently(with_callback):
    """On a rank: values from before a batch of the same data, and after it.

    Rank 0 has trained before, as if it had loaded a model. With the callback ranks train apart.
    """
    rank = collective.current().rank
    optimizer, model = dynamic(momentum(), 16.0, 100, is_distributed=not with_callback), make_model()
    model.set_weights([value + rank for value in model.get_weights()])
    model.compile(optimizer, loss="mse")
    if rank == 0:
        optimizer.build(model.trainable_variables)
        for variable in optimizer.variables:
            if variable.path.endswith("momentum"):
                variable.assign(np.ones(variable.shape))
        optimizer.learning_rate = 0.5
        optimizer._pipeline.pipeline.loss_scale_managers[0].set_loss_scale(32.0)
    begun = [value.tolist() for value in model.get_weights()]
    callbacks = [NPUBroadcastGlobalVariablesCallback(0)] if with_callback else []
    state = Trace(lambda optimizer: [value.numpy().tolist() for value in [*model.variables, *optimizer.variables]])
    fit(optimizer, make_data(1), model, callbacks=[*callbacks, state])
    return begun, state.values, float(optimizer.learning_rate), float(optimizer.loss_scale)


@pytest.mark.parametrize("with_callback", [True, False])
def test_all_ranks_start_from_what_rank_0_has(on_ranks, with_callback):
    (begun, *first), (begun_there, *second) = on_ranks(2, started_differently, with_callback)
    assert begun != begun_there
    assert first == second
    assert first[1:] == [0.5, 32.0]


def accumulated_in_a_saved_window(folder):
    """Returns, on a rank, the state after seven batches in windows of two; also if saved after three and resumed."""
    rank = collective.current().rank
    data = make_data(7, poisoned=[1] if rank == 1 else [])
    share = [np.roll(part, BATCH_SIZE * rank // 2, axis=0) for part in data]
    states = []
    for is_resumed in (False, True):
        model, done = make_model(), 3 * BATCH_SIZE
        fit(dynamic(momentum(), stages=[Accumulate(2)]), [part[:done] for part in share], model)
        if is_resumed:
            model.save(f"{folder}/{rank}.keras")
            model = keras.models.load_model(f"{folder}/{rank}.keras")
        rest = [part[done:] for part in share]
        model.fit(*rest, batch_size=BATCH_SIZE, shuffle=False, verbose=0)
        states.append({**state_of(model), "scale": model.optimizer.loss_scale.numpy()})
    return states


def test_a_job_that_loads_its_model_goes_on_with_the_same_bits(on_ranks, tmp_path):
    (whole, resumed), (whole_there, resumed_there) = on_ranks(2, accumulated_in_a_saved_window, str(tmp_path))
    assert_same_bits(resumed, whole)
    assert_same_bits(whole_there, whole)
    assert_same_bits(resumed_there, whole)


def metrics_of_ranks():
    """On a rank: the loss that the history shows, of batches of its own."""
    rank = collective.current().rank
    model = make_model()
    model.compile(KerasDistributeOptimizer(keras.optimizers.SGD(0.0)), loss="mse")
    tokens, labels = make_data(2)
    stop = keras.callbacks.EarlyStopping("loss", patience=0, min_delta=1.0)
    history = model.fit(tokens, labels + rank, verbose=0, epochs=3, callbacks=npu_callbacks_append([stop]))
    return history.history["loss"]


def test_callbacks_see_the_mean_of_all_ranks_and_stop_together(on_ranks):
    first, second = on_ranks(2, metrics_of_ranks)
    assert first == second
    assert len(first) == 2


def refused_on_a_rank():
    with pytest.raises(ValueError, match="jit_compile=True"):
        fit(KerasDistributeOptimizer(momentum()), make_data(1), jit_compile=True)
    with pytest.raises(ValueError, match="loss scaling must be outside the reduction"):
        keras.optimizers.LossScaleOptimizer(KerasDistributeOptimizer(momentum()))


def test_refusals(on_ranks):
    on_ranks(2, refused_on_a_rank)


def transfers_in_a_step(wrapper):
    """On a rank: how many transfers of gradients are in a traced step, by the door through which gradients come."""
    optimizer, variable = WRAPPERS[wrapper](momentum()), keras.Variable([1.0, 2.0])
    optimizer.build([variable])

    def tape(scale=lambda loss: loss):
        with tf.GradientTape() as tape:
            loss = scale(tf.reduce_sum(variable.value**2))
        return [tape.gradient(loss, variable)]

    def own_clipping():
        scaled = tape(getattr(optimizer, "get_scaled_loss", lambda loss: loss))
        gradients = getattr(optimizer, "get_unscaled_gradients", lambda gradients: gradients)(scaled)
        optimizer.apply([tf.clip_by_norm(gradients[0], 1.0)], [variable])

    doors = [
        lambda: optimizer.apply(tape(optimizer.scale_loss), [variable]),
        lambda: optimizer.apply(tape()),
        lambda: optimizer.apply_gradients(zip(tape(optimizer.scale_loss), [variable])),
        own_clipping,
    ]
    return [transfers_of(lambda step=step: [step(), None][1]) for step in doors]


@pytest.mark.parametrize("wrapper", ["distributed", "scaled"])
def test_gradients_travel_once_through_whichever_door_they_come(on_ranks, wrapper):
    assert on_ranks(2, transfers_in_a_step, wrapper) == [[1, 1, 1, 1]] * 2


def values_after_broadcast():
    """On a rank: what it has of two variables that began with its own number."""
    variables = [keras.Variable([float(collective.current().rank)]) for _ in range(2)]
    hccl_ops.broadcast(variables[:1], 1)
    npu_device.distribute.broadcast(variables[1:], 1)
    return [float(variable.value[0]) for variable in variables]


def test_a_broadcast_sets_variables(on_ranks):
    assert on_ranks(2, values_after_broadcast) == [[1.0, 1.0]] * 2


def said_of(wrapper, is_sharded):
    """On a rank: what is said while it trains; and the losses, which show that no batch is lost."""
    data = make_data(STEPS)
    share, size = share_of(data) if is_sharded else (data, BATCH_SIZE)
    with lines_said(errors.__name__, exchanges.__name__) as lines:
        _, losses = fit(WRAPPERS[wrapper](momentum()), share, batch_size=size, callbacks=npu_callbacks_append([]))
    return [" ".join(line.split()[:6]) for line in lines], len(losses)


@pytest.mark.parametrize(
    "wrapper, is_sharded, said",
    [
        ("bare", True, ["npu_bridge: 2 ranks train apart: a", "npu_bridge: to train one model, write"]),
        ("distributed", True, []),
        ("distributed", False, ["npu_bridge: all 2 ranks have read"]),
    ],
)
def test_ranks_that_cannot_help_each_other_are_told(on_ranks, wrapper, is_sharded, said):
    assert on_ranks(2, said_of, wrapper, is_sharded) == [(said, STEPS), ([], STEPS)]


def unequal_numbers_of_batches():
    """On a rank: how many steps are made where one rank has four batches, the other two; and weights with a dropout."""
    rank, end = collective.current().rank, EndTogetherCallback()
    model = keras.Sequential([keras.layers.Input([4]), keras.layers.Dropout(0.5, seed=rank), keras.layers.Dense(1)])
    model.compile(KerasDistributeOptimizer(momentum()), loss="mse", metrics=["mae"])
    rows = np.random.RandomState(rank).randn(16 + 16 * (1 - rank), 4).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((rows, rows[:, :1])).batch(8)
    model.fit(end.look_ahead(data), epochs=3, verbose=0, callbacks=npu_callbacks_append([end]))
    seeds = [variable.numpy().tolist() for variable in model.non_trainable_variables]
    return int(model.optimizer.iterations), [value.tolist() for value in model.get_weights()[:2]], seeds


def test_ranks_with_unequal_numbers_of_batches_end_together(on_ranks):
    """Each rank continues to draw its own numbers."""
    (steps, weights, seeds), (steps_there, weights_there, seeds_there) = on_ranks(2, unequal_numbers_of_batches)
    assert steps == steps_there == 6
    assert weights == weights_there
    assert seeds != seeds_there


STAGES = {
    "freeze": lambda: [Freeze(FreezeSchedule(groups=2))],
    "top k": lambda: [TopK(0.25)],
    "threshold and centralize": lambda: [Threshold(1e-3), CentralizeGradients()],
    "adasum": lambda: [Adasum()],
    "partial": lambda: [PartialSync(2)],
}


def trained_with_stages():
    """On a rank: by stages, the weights after some steps on data of its own; those of `PartialSync` once averaged."""
    rank, found = collective.current().rank, {}
    for name, make in STAGES.items():
        data = [np.roll(part, BATCH_SIZE * rank, axis=0) for part in make_data(STEPS)]
        model, _ = fit(dynamic(momentum(), stages=make()), data)
        if name == "partial":
            sync_all(model.optimizer)
        found[name] = state_of(model)
    return found


def test_ranks_stay_alike_with_every_stage(on_ranks):
    first, second = on_ranks(2, trained_with_stages)
    plain = trained("distributed", "fit")
    for name, state in first.items():
        weights = dict(list(state.items())[:5])
        assert_same_bits(second[name], weights)
        assert any(value.tobytes() != plain[key].tobytes() for key, value in weights.items()), name
