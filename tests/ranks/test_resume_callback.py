"""A `fit` that resumes from the state of `ResumeCallback` ends with the weights of an uninterrupted one."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.estimator.npu.npu_helpers import npu_callbacks_append, npu_keras_optimizer
from npu_bridge.estimator.npu.npu_loss_scale_manager import ExponentialUpdateLossScaleManager
from npu_bridge.reporting import CsvWriter, MetricsCallback, ReportCallback
from npu_bridge.reporting.history import History
from npu_bridge.session import ResumeCallback
from npu_bridge.session.elastic import resume_callback
from npu_bridge.session.elastic.stop_request import StopRequest
from npu_bridge.stages import Accumulate, Adasum
from npu_device.train.optimizer import NpuLossScaleOptimizer
from tests.rank_pool import on_each_rank
from tests.small_disk import small_disk  # noqa: F401 - a fixture

_BATCHES = 7


def _dataset():
    """Batches of this rank; the gradients of the second one overflow."""
    rows = np.random.RandomState(collective.current().rank).randn(_BATCHES, 2, 3).astype(np.float32)
    sums = rows.sum(axis=-1, keepdims=True)
    rows[1] = 1e38
    return tf.data.Dataset.from_tensor_slices((rows, sums))


def _model(stages=()):
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, kernel_initializer="zeros", input_shape=(3,))])
    manager = ExponentialUpdateLossScaleManager(2.0**10, 2, decr_every_n_nan_or_inf=1)
    model.compile(npu_keras_optimizer(tf.keras.optimizers.Adam(0.1), manager, stages=stages), "mse")
    return model


def _fit(path, stops):
    """On a rank: weights, slots and loss scale after a training in parts, and the batches before each part."""
    starts = []
    for stop in stops:
        model, resume = _model([Accumulate(2)]), ResumeCallback(path, every_n_steps=2)
        done = resume.restore(model)
        starts.append(done)
        dataset = _dataset().skip(done)
        model.fit(dataset, steps_per_epoch=stop - done, verbose=0, callbacks=npu_callbacks_append([resume]))
    values = [*model.get_weights(), *(variable.numpy() for variable in model.optimizer.variables)]
    return starts, values, int(model.optimizer.skipped_steps), float(model.optimizer.loss_scale)


def _cut_and_whole(folder):
    cut, whole = (os.path.join(folder, name, "model.keras") for name in ("cut", "whole"))
    return _fit(cut, (3, _BATCHES)), _fit(whole, (_BATCHES,))


def test_a_resumed_fit_ends_as_one_that_was_not_interrupted(on_ranks, tmp_path):
    for cut, whole in on_ranks(2, _cut_and_whole, str(tmp_path)):
        assert cut[0] == [0, 3] and whole[0] == [0]
        assert cut[2:] == whole[2:] and whole[2] > 0
        for resumed, expected in zip(cut[1], whole[1], strict=True):
            np.testing.assert_array_equal(resumed, expected)
    assert os.listdir(tmp_path / "cut") == ["model.keras"]


class _FullFrom(tf.keras.callbacks.Callback):
    """Fills the disk before the second save, and makes room after the third."""

    def __init__(self, disk):
        super().__init__()
        self._disk = disk

    def on_train_batch_begin(self, batch, logs=None):
        if batch in (2, 6):
            (self._disk.fill if batch == 2 else self._disk.make_room)()


@pytest.mark.parametrize("has_memory", [True, False])
def test_a_disk_that_is_full_for_a_while_does_not_end_the_training(has_memory, small_disk, caplog, monkeypatch):  # noqa: F811
    if not has_memory:
        monkeypatch.setattr("npu_bridge.session.elastic.resume_callback.memory_checkpoints", lambda path: None)
    path, model = str(small_disk.path / "model.keras"), _model()
    model.fit(_dataset(), verbose=0, callbacks=[_FullFrom(small_disk), ResumeCallback(path, every_n_steps=2)])
    assert caplog.text.count("ResumeCallback: the disk is full, so one save is missing") == 2
    assert os.listdir(small_disk.path) == ["model.keras"]
    other = _model()
    assert ResumeCallback(path).restore(other) == _BATCHES
    assert all(map(np.array_equal, model.get_weights(), other.get_weights()))


def test_reports_are_complete_when_a_fit_ends_with_its_process(tmp_path, monkeypatch):
    request = StopRequest()  # that of the process would stay due
    monkeypatch.setattr(resume_callback, "stop_request_of_process", lambda: request)
    reclaim = tf.keras.callbacks.LambdaCallback(
        on_batch_begin=lambda batch, logs: batch == 4 and os.kill(os.getpid(), signal.SIGTERM)
    )
    rows = CsvWriter(str(tmp_path / "rows.csv"))
    callbacks = [
        reclaim,
        ResumeCallback(str(tmp_path / "model.keras")),
        ReportCallback(str(tmp_path), curves=False),
        MetricsCallback(rows, every_n_steps=1),
    ]
    with pytest.raises(SystemExit, match="75"):
        _model().fit(_dataset(), verbose=0, callbacks=npu_callbacks_append(callbacks))
    assert [row.step for row in History(str(tmp_path / "history.jsonl")).rows] == [1, 1, 2, 3, 4]
    assert (tmp_path / "report.html").exists()
    assert (tmp_path / "rows.csv").read_text().splitlines()[-1].startswith("4,")


@pytest.mark.slow("rank 0 takes two seconds to end")
@on_each_rank(2)
def test_after_fit_every_rank_can_load_the_last_file(tmp_path):
    """Rank 0 takes long to end the training."""
    model, path, pause = _model(), str(tmp_path / "model.keras"), 2.0 if collective.current().rank == 0 else 0.0
    slow = tf.keras.callbacks.LambdaCallback(on_train_end=lambda logs: time.sleep(pause))
    callbacks = npu_callbacks_append([slow, ResumeCallback(path, every_n_steps=5)])
    model.fit(_dataset(), verbose=0, callbacks=callbacks)
    other = _model()
    other.load_weights(path)
    assert all(map(np.array_equal, model.get_weights(), other.get_weights()))


@pytest.mark.parametrize("is_accumulated", [True, False])
def test_a_file_of_model_save_tells_batches_and_not_updates(is_accumulated, tmp_path):
    def model():
        made = _model([Accumulate(2)] if is_accumulated else [])
        if not is_accumulated:  # it counts skipped steps, too
            made.compile(NpuLossScaleOptimizer(tf.keras.optimizers.SGD(0.1), initial_scale=8.0), "mse")
        return made

    trained, path = model(), tmp_path / "model.keras"
    trained.fit(_dataset(), verbose=0)
    assert int(trained.optimizer.skipped_steps) > 0
    trained.save(path)
    assert ResumeCallback(path).restore(model()) == _BATCHES


@on_each_rank(2)
def test_a_training_can_be_restored_again(tmp_path):
    """Compares weights and slots after two batches that follow a save, and that follow each of two restores."""
    model, resume, ends = _model([Adasum(on="weights")]), ResumeCallback(str(tmp_path / "model.keras")), []
    model.fit(_dataset().take(3), verbose=0, callbacks=npu_callbacks_append([resume]))
    callbacks = npu_callbacks_append([])
    for is_restored in (False, True, True):
        if is_restored:
            resume.restore(model)
        model.fit(_dataset().skip(3).take(2), verbose=0, callbacks=callbacks)
        values = [*model.weights, *model.optimizer.variables]
        ends.append([value.numpy().tolist() for value in values if value.shape.is_fully_defined()])
    whole, *restored = ends
    assert restored == [whole, whole]


@pytest.mark.few_fast(2, "the other takes the same way")
@pytest.mark.parametrize("kind", ["bare", "scaled by Keras", "wrapped"])
def test_numbers_that_were_set_during_training_are_set_again(tmp_path, kind):
    """A scheduler has changed the rate, which every optimizer keeps in another place than its slots."""

    def compiled():
        model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(3,))])
        optimizer = tf.keras.optimizers.SGD(0.125, momentum=0.5, use_ema=True, ema_overwrite_frequency=3)
        optimizer = npu_keras_optimizer(optimizer) if kind == "wrapped" else optimizer
        if kind == "scaled by Keras":  # as `compile` does in mixed_float16
            optimizer = tf.keras.mixed_precision.LossScaleOptimizer(optimizer)
        model.compile(optimizer, "mse")
        return model

    resume, data = ResumeCallback(tmp_path / "model.keras"), (np.ones([8, 3]), np.ones([8, 1]))
    callbacks = [tf.keras.callbacks.LearningRateScheduler(lambda epoch: 0.0625), resume]
    compiled().fit(*data, epochs=2, verbose=0, callbacks=callbacks)
    other = compiled()
    assert ResumeCallback(tmp_path / "model.keras").restore(other) == 2
    assert float(other.optimizer.learning_rate) == 0.0625
    if kind == "bare":
        other.optimizer.momentum, other.optimizer.ema_overwrite_frequency = 0.75, 2
        other.fit(*data, verbose=0, callbacks=[resume])
        again = compiled()
        ResumeCallback(tmp_path / "model.keras").restore(again)
        assert again.optimizer.momentum == 0.75
        assert repr(again.optimizer.ema_overwrite_frequency) == "2"  # steps are counted by an integer


def test_callbacks_of_a_script_keep_what_they_call_best(tmp_path):
    own = tf.keras.callbacks.LambdaCallback()
    for best in ({"f1": 0.5}, 2.0):
        own.best, own.best_weights = best, "best.h5"
        model = _model()
        resume = ResumeCallback(tmp_path / "model.keras")
        resume.restore(model)
        model.fit(np.ones([8, 3]), np.ones([8, 1]), verbose=0, callbacks=[own, resume])
        assert (own.best, own.best_weights) == (best, "best.h5")


SCORES = [5.0, 4.0, 4.5, 4.4, 4.6, 3.5, 3.9, 3.8, 3.7, 3.6, 3.8, 3.9, 1.0]  # of epochs; what others would reach


def fit_by_scores(keras, path, ends, is_first):
    """Trains with callbacks that count epochs, in parts; returns rates by epoch, and the weights at the end."""
    rates = {}

    def see(epoch, logs):
        logs["score"], rates[epoch] = SCORES[epoch], float(model.optimizer.learning_rate)

    def die(epoch, logs):
        if epoch == end:
            raise KeyboardInterrupt

    begin = 0
    for end in ends:
        model = keras.Sequential([keras.layers.Input([3]), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(0.125, momentum=0.5), "mse")
        resume = ResumeCallback(path)
        assert resume.restore(model) == 2 * begin
        callbacks = [
            keras.callbacks.LambdaCallback(on_epoch_end=see, on_epoch_begin=die),
            keras.callbacks.ReduceLROnPlateau(monitor="score", mode="min", patience=2, cooldown=1, factor=0.5),
            keras.callbacks.EarlyStopping(monitor="score", mode="min", patience=6, restore_best_weights=True),
        ]
        callbacks.insert(0 if is_first else 3, resume)
        rows = np.random.RandomState(1).randn(4, 3).astype(np.float32)
        data = rows, rows.sum(axis=1) ** 2
        callbacks = npu_callbacks_append(callbacks)
        with contextlib.suppress(KeyboardInterrupt):
            model.fit(*data, 2, initial_epoch=begin, epochs=13, shuffle=False, verbose=0, callbacks=callbacks)
        resume._writer.wait()
        assert all(isinstance(vars(each).get("best_epoch", 0), int) for each in callbacks)  # Keras prints it
        begin = end
    return rates, model.get_weights()


@pytest.mark.slow("many epochs; of Keras 3 in tests/gradients/test_keras3_callbacks.py")
@pytest.mark.parametrize("ends, is_first", [((3, 8, len(SCORES)), True), ((1, 4, 7, len(SCORES)), False)])
def test_callbacks_go_on_counting_in_a_resumed_fit(tmp_path, ends, is_first):
    """Rates fall, the fit ends, and the best weights come back as in a fit that nothing interrupted."""
    whole, expected = fit_by_scores(tf.keras, str(tmp_path / "whole" / "model.keras"), ends[-1:], True)
    assert [*whole.values()] == [0.125] * 4 + [0.0625] * 4 + [0.03125] * 2 + [0.015625] * 2
    rates, weights = fit_by_scores(tf.keras, str(tmp_path / "cut" / "model.keras"), ends, is_first)
    assert rates == whole
    for resumed, value in zip(weights, expected, strict=True):
        np.testing.assert_array_equal(resumed, value)


def test_what_cannot_be_resumed_is_refused(tmp_path):
    with pytest.raises(ValueError, match="Expected a .keras file"):
        ResumeCallback("model.h5")
    with pytest.raises(ValueError, match="Expected a path of a local disk; got gs://bucket/model.keras"):
        ResumeCallback("gs://bucket/model.keras")
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    (tmp_path / "model.keras").touch()
    with pytest.raises(ValueError, match="Expected a built model"):
        ResumeCallback(tmp_path / "model.keras").restore(model)
    model.compile(tf.keras.optimizers.legacy.SGD(), "mse")
    with pytest.raises(ValueError, match="no legacy optimizer"):
        ResumeCallback(tmp_path / "model.keras").restore(model)


@pytest.mark.parametrize("package", ["tensorflow.keras", "keras"])
def test_a_model_with_an_optimizer_that_would_not_resume_is_refused(package, tmp_path):
    keras = tf.keras if package == "tensorflow.keras" else pytest.importorskip("keras")
    model = keras.Sequential([keras.layers.Input([2]), keras.layers.Dense(1)])
    resume = ResumeCallback(tmp_path / "model.keras")
    model.inner = keras.optimizers.SGD(0.1)
    model.compile(npu_keras_optimizer(model.inner, ExponentialUpdateLossScaleManager(8.0, 2)), "mse")
    model.fit(np.ones([2, 2]), np.ones([2, 1]), verbose=0, callbacks=[resume])
    assert resume.restore(model) == 1
    model.others = [keras.optimizers.Adam()]
    with pytest.raises(
        ValueError, match="the other optimizers of this model would not resume. .*; got optimizers in others"
    ):
        resume.restore(model)
    with pytest.raises(ValueError, match="would not resume"):
        model.fit(np.ones([2, 2]), np.ones([2, 1]), verbose=0, callbacks=[resume])


SHAPES = [(0, "4, 1", "4, 2"), (1, "1,", "2,")]


@pytest.mark.parametrize("package", ["tensorflow.keras", "keras"])
def test_the_checkpoint_of_another_model_is_named(package, tmp_path):
    keras = tf.keras if package == "tensorflow.keras" else pytest.importorskip("keras")
    path = tmp_path / "model.keras"

    def model(units):
        made = keras.Sequential([keras.layers.Input([8]), keras.layers.Dense(4), keras.layers.Dense(units)])
        made.compile(npu_keras_optimizer(keras.optimizers.Adam()), "mse")
        made.optimizer.build(made.trainable_variables)
        return made

    model(1).save(path)
    assert ResumeCallback(path).restore(model(1)) == 0
    weights, bias = (rf"variable {n} of \w+ of shape \({a}\) instead of \({b}\)" for n, a, b in SHAPES)
    expected = rf"is a checkpoint of another model. Expected this model's variables; got {weights}, {bias}. Use another"
    with pytest.raises(ValueError, match=expected):
        ResumeCallback(path).restore(model(2))
