"""A self-written loop that resumes from the state of `ResumableLoop` ends like an uninterrupted one."""

from __future__ import annotations

import contextlib
import io
import os
import re

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.estimator.npu.npu_helpers import npu_keras_optimizer
from npu_bridge.estimator.npu.npu_loss_scale_manager import ExponentialUpdateLossScaleManager
from npu_bridge.session import ResumableLoop
from npu_bridge.session.elastic import stop_request
from npu_bridge.stages import Accumulate
from tests.canaries.of_keras3 import IS_BESIDE, REASON
from tests.small_disk import small_disk  # noqa: F401 - a fixture

UPDATES = 7
GENERATIONS = ["current", "legacy", pytest.param("keras3", marks=pytest.mark.skipif(not IS_BESIDE, reason=REASON))]


def _make(generation):
    """A model with batch statistics, and its optimizer."""
    keras = tf.keras
    if generation == "keras3":
        import keras
    layers = keras.layers
    model = keras.Sequential([layers.Input([3]), layers.BatchNormalization(), layers.Dense(1)])
    # Each rank begins with weights of its own, which rank 0's replace.
    model.set_weights([np.full(np.shape(value), 1.0 + collective.current().rank) for value in model.get_weights()])
    manager = ExponentialUpdateLossScaleManager(2.0**127, 2, 1, 2.0, 0.5)
    family = keras.optimizers.legacy if generation == "legacy" else keras.optimizers
    return model, npu_keras_optimizer(family.Adam(0.1), manager, stages=[Accumulate(2)])


def _step_of(model, optimizer, generation):
    @tf.function
    def train_step(rows):
        with tf.GradientTape() as tape:
            loss = 100.0 * tf.reduce_mean((model(rows, training=True) - tf.reduce_sum(rows, 1, True)) ** 2)
            scaled = optimizer.scale_loss(loss) if generation == "keras3" else loss
        if generation == "keras3":
            optimizer.apply(tape.gradient(scaled, model.trainable_variables), model.trainable_variables)
        else:
            optimizer.minimize(loss, model.trainable_variables, tape=tape)

    return train_step


def _train(folder, generation, stops):
    """On a rank: updates before each part, values of the end; a part is left by a `break` after so many updates."""
    starts = []
    for stop in stops:
        model, optimizer = _make(generation)
        train_step = _step_of(model, optimizer, generation)
        loop = ResumableLoop(folder, model, optimizer, every_n_steps=2)
        batch = 2 * int(optimizer.iterations + optimizer.skipped_steps)
        starts.append(int(optimizer.iterations))
        for reached in loop.until(UPDATES):
            if reached == stop:
                break
            numbers = np.random.RandomState(10 * batch + collective.current().rank)
            train_step(tf.constant(numbers.randn(4, 3), tf.float32))
            batch += 1
    # Batch statistics are each rank's own, and rank 0's are saved.
    weights = model.weights if collective.current().rank == 0 else model.trainable_variables
    counters = [int(optimizer.iterations), int(optimizer.skipped_steps), float(optimizer.loss_scale)]
    return starts, [*(np.asarray(weight) for weight in weights), *counters]


def _cut_and_whole(folder, generation):
    output = io.StringIO()
    with contextlib.redirect_stderr(output):
        cut = _train(os.path.join(folder, "cut"), generation, [5, None])
    return cut, _train(os.path.join(folder, "whole"), generation, [None]), output.getvalue()


@pytest.mark.few_fast(1, "other generations of Keras take the same way")
@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_resumed_loop_ends_as_one_that_was_not_interrupted(on_ranks, tmp_path, generation):
    for cut, whole, printed in on_ranks(2, _cut_and_whole, str(tmp_path), generation):
        assert cut[0] == [0, 4] and whole[0] == [0]
        assert whole[1][-3] == UPDATES and whole[1][-2] > 0, "no step was skipped"
        for resumed, expected in zip(cut[1], whole[1], strict=True):
            np.testing.assert_array_equal(resumed, expected)
        assert "started from different values" not in printed
    names = {name for name in os.listdir(tmp_path / "whole") if name.endswith(".index")}
    assert names == {"ckpt-6.index", "ckpt-7.index"}


@pytest.mark.parametrize(
    ("model", "steps", "error", "says"),
    [
        (tf.keras.Sequential([tf.keras.layers.Dense(1)]), None, ValueError, "the model has no weights yet"),
        (tf.Module(), 0, ValueError, "every_n_steps is out of range"),
        (tf.Module(), 1.5, TypeError, "every_n_steps is not an integer"),
    ],
)
def test_what_cannot_be_resumed_is_refused(tmp_path, model, steps, error, says):
    with pytest.raises(error, match=re.escape(says)):
        ResumableLoop(tmp_path, model, tf.keras.optimizers.SGD(), every_n_steps=steps)
    with tf.Graph().as_default(), pytest.raises(ValueError, match=r"Expected eager execution; got a graph"):
        ResumableLoop(tmp_path, tf.Module(), tf.keras.optimizers.SGD())


def test_nothing_is_saved_twice_and_a_module_is_a_model_too(tmp_path):
    class Line(tf.Module):
        def __init__(self):
            self.weight = tf.Variable(0.0)

    for _ in range(2):
        line, optimizer = Line(), tf.keras.optimizers.SGD(0.1)
        for _ in ResumableLoop(tmp_path, line, optimizer).until(3):
            with tf.GradientTape() as tape:
                loss = (line.weight - 1.0) ** 2
            optimizer.minimize(loss, [line.weight], tape)
        assert float(line.weight) == pytest.approx(1 - 0.8**3)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "ckpt-3.data-00000-of-00001", "ckpt-3.index"]


def test_the_checkpoint_of_another_model_is_named(tmp_path):
    for name in ("encoder", "body"):
        model, optimizer = tf.Module(), tf.keras.optimizers.SGD(0.1)
        setattr(model, name, tf.Variable(1.0, name=name))
        got = contextlib.nullcontext() if name == "encoder" else pytest.raises(ValueError, match="got nothing for body")
        with got:
            for _ in ResumableLoop(tmp_path, model, optimizer).until(1):
                optimizer.apply_gradients([(1.0, model.trainable_variables[0])])


def test_windows_that_never_end_together_end_a_loop_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(stop_request, "_MOST_BATCHES_TO_WAIT", 5)
    pair = tf.Module()
    pair.weights = [tf.Variable(0.0), tf.Variable(0.0)]
    optimizer = npu_keras_optimizer(tf.keras.optimizers.SGD(0.1), is_distributed=False, stages=[Accumulate(2)])

    def train(weight):
        with tf.GradientTape() as tape:
            loss = (weight - 1.0) ** 2
        optimizer.minimize(loss, [weight], tape)

    optimizer.build(pair.weights)
    train(pair.weights[0])  # out of step with the other one from now on
    for number, _ in enumerate(ResumableLoop(tmp_path, pair, optimizer).until(3)):
        for weight in pair.weights:
            train(weight)
        assert number < 20
    assert tf.train.latest_checkpoint(tmp_path)


def test_a_loop_goes_on_while_the_disk_is_full_and_saves_at_its_end(small_disk, caplog):  # noqa: F811
    model, optimizer = _make("current")
    train_step = _step_of(model, optimizer, "current")
    loop = ResumableLoop(str(small_disk.path), model, optimizer, every_n_steps=2)
    for batch, reached in enumerate(loop.until(UPDATES)):
        if batch == 6:
            small_disk.fill()
        if reached == UPDATES - 1 and (small_disk.path / "filling").exists():
            small_disk.make_room()
        train_step(tf.constant(np.random.RandomState(batch).randn(4, 3), tf.float32))
    assert "ResumableLoop: the disk is full, so one save is missing" in caplog.text
    assert not [name for name in os.listdir(small_disk.path) if "temp" in name]
    other, its_optimizer = _make("current")
    ResumableLoop(str(small_disk.path), other, its_optimizer)
    assert int(its_optimizer.iterations) == UPDATES
    assert all(map(np.array_equal, model.get_weights(), other.get_weights()))
