"""`AccelerateTrainCallback`: `model.fit` leaves its low precision once, by step or loss; nothing else changes."""

from __future__ import annotations

import collections
import contextlib
import logging
import os

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.base.tf_internals.sessions import collected_function_graphs
from npu_bridge.estimator.npu.npu_helpers import npu_keras_optimizer
from npu_bridge.gradients.first_step.adapted_layers import renew_adapted_layers
from npu_bridge.session.precision import ORIGINAL, AccelerateTrainCallback, Policy, list_builds, policy_of_last_step
from npu_bridge.session.precision.functions import apply_precision_to_model
from npu_bridge.stages import Accumulate
from tests.goldens.two_layers import assert_same_bits
from tests.session.precision.small_models import dtypes_of, precision_of, session_of, tf1

LOW = Policy("mixed", "float16")
BATCHES = 4


def data(examples=8 * BATCHES):
    random = np.random.RandomState(0)
    return random.randn(examples, 8).astype("f"), random.randn(examples, 4).astype("f")


def make_model(optimizer="adam", **arguments):
    initializers = [tf.keras.initializers.RandomNormal(stddev=0.4, seed=seed) for seed in (1, 2)]
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [
            layers.Input([8]),
            layers.Dense(16, "relu", kernel_initializer=initializers[0]),
            layers.Dense(4, kernel_initializer=initializers[1]),
        ]
    )
    model.compile(optimizer, "mse", **arguments)
    return model


def state_of(model):
    values = {f"weight {number}": value for number, value in enumerate(model.get_weights())}
    return {**values, **{variable.name: variable.numpy() for variable in model.optimizer.variables}}


class Steps(tf.keras.callbacks.Callback):
    """Writes down what every step followed, the loss so far and the state after it."""

    def __init__(self, accelerate):
        super().__init__()
        self.accelerate = accelerate
        self.policies, self.losses, self.states = [], [], []

    def on_train_batch_end(self, batch, logs=None):
        self.policies.append(self.accelerate.policy)
        self.losses.append(float(logs["loss"]))
        self.states.append(state_of(self.model))


@contextlib.contextmanager
def built():
    """Inside, the matrix kernels of every executor that is built are counted by dtype."""
    counts = collections.Counter()
    with collected_function_graphs() as metadata:
        yield counts
    for function in metadata.function_graphs:
        counts.update(dtypes_of([node for graph in function.partition_graphs for node in graph.node]))


def fit(accelerate, model=None, epochs=2, **arguments):
    model, steps = model or make_model(), Steps(accelerate)
    model.fit(
        *data(), batch_size=8, epochs=epochs, shuffle=False, verbose=0, callbacks=[accelerate, steps], **arguments
    )
    return model, steps


def test_by_step(caplog):
    with caplog.at_level(logging.INFO, "npu_bridge"), built() as counts:
        model, steps = fit(AccelerateTrainCallback("fast|step|0.5"))
    assert [policy == LOW for policy in steps.policies] == [True] * 4 + [False] * 4
    assert counts == {"float16": 5, "float32": 5}  # one executor each
    assert model.optimizer.iterations == 8
    assert "precision: steps 0-3 in float16, 4-7 in float32." in caplog.text
    assert "precision: float32 from here on (step 4); its first step took" in caplog.text


def test_bfloat16(bfloat16):
    with built() as counts:
        fit(AccelerateTrainCallback("fast1|step|0.5"))
    assert counts == {"bfloat16": 5, "float32": 5}


def test_after_the_switch_a_step_is_that_of_a_stock_fit():
    _, steps = fit(AccelerateTrainCallback("fast|step|0.5"), make_model())
    stock = make_model()
    stock.fit(*data(), batch_size=8, epochs=1, verbose=0, shuffle=False)  # makes the slots
    inputs, targets = data()
    for step in range(1, 8):
        before = list(steps.states[step - 1].values())
        stock.set_weights(before[:4])
        for variable, value in zip(stock.optimizer.variables, before[4:]):
            variable.assign(value)
        batch = slice(8 * (step % BATCHES), 8 * (step % BATCHES + 1))
        stock.train_on_batch(inputs[batch], targets[batch])
        expected = dict(zip(steps.states[step], state_of(stock).values()))
        if step >= 4:
            assert_same_bits(steps.states[step], expected)
        else:
            assert any(steps.states[step][name].tobytes() != value.tobytes() for name, value in expected.items())


def test_by_loss():
    callback = AccelerateTrainCallback("fast|loss|1.25", final_loss=1.2)
    _, steps = fit(callback, make_model(tf.keras.optimizers.SGD(0.05)), epochs=6)
    reached = next(number for number, loss in enumerate(steps.losses) if loss <= 1.5)
    assert 0 < reached < len(steps.losses) - 1
    assert [policy == LOW for policy in steps.policies] == [True] * (reached + 1) + [False] * (23 - reached)


def test_evaluation_and_prediction_are_never_accelerated():
    inputs, targets = data()
    with built() as counts:
        model, _ = fit(AccelerateTrainCallback("fast|step|0.5", total_step=100), validation_data=(inputs, targets))
    assert counts == {"float16": 5, "float32": 2}  # the validation
    stock = make_model()
    stock.set_weights(model.get_weights())
    assert model.evaluate(inputs, targets, verbose=0) == stock.evaluate(inputs, targets, verbose=0)
    assert model.predict(inputs, verbose=0).tobytes() == stock.predict(inputs, verbose=0).tobytes()


def test_everything_is_as_it_was_afterwards():
    from tensorflow.python.eager import context

    model = make_model()
    original = model.make_train_function()
    before = context.context().function_call_options.config_proto_serialized
    variables = set(os.environ)
    fit(AccelerateTrainCallback("fast|step|0.5", total_step=100), model)
    assert model.train_function is original
    assert context.context().function_call_options.config_proto_serialized == before
    assert set(os.environ) == variables
    with built() as counts:
        model.fit(*data(), batch_size=8, verbose=0)
    assert set(counts) == {"float32"}


@pytest.mark.parametrize("is_by_level", [False, True])
def test_a_fit_stays_in_low_precision_when_its_adapted_layers_are_renewed(is_by_level):
    normal = tf.keras.layers.Normalization()
    normal.adapt(data()[0])
    model = tf.keras.Sequential([normal, *make_model().layers])
    model.compile("sgd", "mse")
    if is_by_level:
        apply_precision_to_model(model, precision_of(precision_mode_v2="mixed_float16"))
    callbacks = [] if is_by_level else [AccelerateTrainCallback("fast|step|0.9", total_step=100)]
    callbacks.append(tf.keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: renew_adapted_layers(model)))
    with built() as counts:
        model.fit(*data(), batch_size=8, verbose=0, callbacks=callbacks)
    assert set(counts) == {"float16"}


def test_a_fit_that_failed_does_not_accelerate_the_next():
    class Fail(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise KeyboardInterrupt

    model, off = make_model(), AccelerateTrainCallback("")
    with pytest.raises(KeyboardInterrupt):
        model.fit(*data(), batch_size=8, verbose=0, callbacks=[AccelerateTrainCallback("fast|step|0.5"), Fail()])
    with built() as counts:
        model.fit(*data(), batch_size=8, verbose=0, callbacks=[off])
    assert counts == {"float32": 5}


def test_resumed_and_repeated_fits():
    """A second `fit` continues: before the switch in low precision, after it unchanged."""
    callback, model = AccelerateTrainCallback("fast|step|0.5", total_step=12), make_model()
    lows = [[policy == LOW for policy in fit(callback, model, epochs=1)[1].policies] for _ in range(3)]
    assert lows == [[True] * 4, [True] * 2 + [False] * 2, [False] * 4]
    late = fit(AccelerateTrainCallback("fast|step|0.5", total_step=12), model, epochs=1)[1]
    assert [policy == LOW for policy in late.policies] == [True] + [False] * 3  # its first step always is
    by_epoch = fit(AccelerateTrainCallback("fast|step|0.5"), make_model(), epochs=3, initial_epoch=1)[1]
    assert [policy == LOW for policy in by_epoch.policies] == [True] * 4 + [False] * 4


@pytest.mark.parametrize("total_step", [6, None])
def test_steps_are_updates_of_several_batches(total_step):
    callback, model = AccelerateTrainCallback("fast|step|0.5", total_step=total_step), make_model()
    model.compile(npu_keras_optimizer(tf.keras.optimizers.Adam(), stages=[Accumulate(2)]), "mse")
    fit(AccelerateTrainCallback("fast|step", total_step=100), model, epochs=1)  # two of six updates
    assert [policy == LOW for policy in fit(callback, model)[1].policies] == [True] * 2 + [False] * 6


def test_a_smaller_last_batch_is_in_low_precision_too():
    model, inputs, targets = make_model(), *data(8 * BATCHES + 3)
    with built() as counts:
        callback = AccelerateTrainCallback("fast|step|0.9", total_step=100)
        model.fit(inputs, targets, batch_size=8, epochs=2, verbose=0, callbacks=[callback])
    assert set(counts) == {"float16"}


def test_data_of_unknown_length():
    def generate():
        while True:
            yield data(8)

    model = make_model()
    with pytest.raises(ValueError, match="total_step"):
        model.fit(generate(), epochs=2, verbose=0, callbacks=[AccelerateTrainCallback("fast|step")])
    callback = AccelerateTrainCallback("fast|step|0.5")
    steps = Steps(callback)
    make_model().fit(generate(), steps_per_epoch=3, epochs=2, verbose=0, callbacks=[callback, steps])
    assert [policy == LOW for policy in steps.policies] == [True] * 3 + [False] * 3


def test_data_that_ends_before_its_announced_length():
    callback = AccelerateTrainCallback("fast|step|0.5", total_step=8)
    steps = Steps(callback)
    dataset = tf.data.Dataset.from_tensor_slices(data()).batch(8).filter(lambda *_: True)  # of unknown length
    make_model().fit(dataset, epochs=2, verbose=0, callbacks=[callback, steps])
    assert [policy == LOW for policy in steps.policies] == [True] * 4 + [False] * 4


def test_errors():
    with pytest.raises(ValueError, match="accelerate_train_mode"):
        AccelerateTrainCallback("fast|step|0.1")
    with pytest.raises(ValueError, match="final_loss"):
        AccelerateTrainCallback("fast|loss")
    with pytest.raises(ValueError, match="run_eagerly"):
        fit(AccelerateTrainCallback("fast|step"), make_model(run_eagerly=True))
    with pytest.raises(ValueError, match="not in the logs"):
        fit(AccelerateTrainCallback("fast|loss", final_loss=1.0, loss="accuracy"))


@pytest.fixture
def keras_session(graph):
    """Makes sessions for Keras in a TF 1 graph, where it trains in one."""
    sessions = []

    def make(**keys):
        sessions.append(session_of(graph, precision_of(**keys) if keys else None))
        tf1.keras.backend.set_session(sessions[-1])
        return sessions[-1]

    yield make
    tf1.keras.backend.set_session(None)
    for session in sessions:
        session.close()


def fit_in_session(session, callback, **arguments):
    """The dtypes of the matrix kernels of every training step."""
    metadata, seen = tf1.RunMetadata(), []

    class Kernels(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            nodes = [node for part in metadata.partition_graphs for node in part.node]
            seen.append((dtypes_of(nodes), policy_of_last_step(session)))

    model = make_model(options=tf1.RunOptions(output_partition_graphs=True), run_metadata=metadata)
    model.fit(*data(), batch_size=8, epochs=2, verbose=0, callbacks=[callback, Kernels()], **arguments)
    assert all(policy == (LOW if "float16" in dtypes else ORIGINAL) for dtypes, policy in seen)
    return [dtypes for dtypes, _ in seen]


def test_in_a_session(keras_session):
    session = keras_session(experimental_accelerate_train_mode="fast|step|0.5")
    seen = fit_in_session(session, AccelerateTrainCallback("fast|step|0.5"), validation_data=data())
    assert seen == [{"float16": 5}] * 4 + [{"float32": 5}] * 4
    assert [build.policy for build in list_builds(session) if build.is_training] == [LOW, ORIGINAL]
    assert {build.policy for build in list_builds(session) if not build.is_training} == {ORIGINAL}


def test_a_session_that_does_not_follow(keras_session):
    for keys in ({}, {"experimental_accelerate_train_mode": "fast|step|0.4"}):
        session = keras_session(**keys)
        with pytest.raises(ValueError, match="set_keras_session_npu_config"):
            fit_in_session(session, AccelerateTrainCallback("fast|step|0.5"))
