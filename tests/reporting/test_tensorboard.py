"""Curves for TensorBoard, read back from event files."""

from __future__ import annotations

import glob
import io
import json
import time
import urllib.request

import numpy as np
import pytest
import tensorflow as tf
from tensorboard import default, program

from npu_bridge.npu_init import (
    ExponentialUpdateLossScaleManager,
    FixedLossScaleManager,
    NPUEstimator,
    NPUEstimatorSpec,
    NPUOptimizer,
    NPURunConfig,
    npu_keras_optimizer,
)
from npu_bridge.reporting import History, ReportCallback, ReportHook, TensorBoardCallback, TensorBoardHook
from npu_bridge.session.precision import PrecisionSummaryHook
from tests.reporting import stepping

tf1 = tf.compat.v1
ALL = {"loss", "loss_scale", "skipped_steps", "learning_rate", "global_step/sec", "gradient_norm", "memory_mb"}
ONCE = ("loss", PrecisionSummaryHook.TAG)  # no step of these comes twice


def curves(folder):
    """Entries `step: number or text` of each curve, without "training/", each step once."""
    found = {}
    for path in glob.glob(f"{folder}/events*"):
        for event in tf1.train.summary_iterator(path):
            for value in event.summary.value:
                is_text = value.metadata.plugin_data.plugin_name == "text"
                entry = value.tensor.string_val[0].decode() if is_text else value.simple_value
                points = found.setdefault(value.tag.removeprefix("training/"), {})
                assert event.step not in points or value.tag not in ONCE, f"{value.tag} is there twice"
                points[event.step] = entry
    return found


@pytest.mark.parametrize("scaled", [True, False])
def test_every_npu_estimator_writes_them(tmp_path, scaled):
    """d/dw (w - 3)^2 at w = 0 is -6, and the poisoned third batch is skipped."""

    def input_fn():
        batches = [1.0, 1.0, np.inf, 1.0, 1.0] if scaled else [1.0] * 4
        return tf.data.Dataset.from_tensor_slices(np.array(batches, np.float32))

    def model_fn(features, mode):
        weight = tf1.get_variable("weight", [], initializer=tf1.zeros_initializer())
        distance = tf.matmul([[1.0]], tf.reshape(weight - 3.0, [1, 1]))  # which float16 has a kernel for
        loss = tf.square(tf.reshape(distance, [])) * features
        manager = ExponentialUpdateLossScaleManager(2**10, 1000, decr_every_n_nan_or_inf=1)
        given = {"loss_scale_manager": manager, "is_loss_scale": True} if scaled else {}
        optimizer = NPUOptimizer(tf1.train.GradientDescentOptimizer(0.25), **given)
        return NPUEstimatorSpec(mode, loss=loss, train_op=optimizer.minimize(loss, tf1.train.get_global_step()))

    every_step = {"save_summary_steps": 1, "log_step_count_steps": None} if scaled else {"log_step_count_steps": 1}
    mode = "allow_mix_precision" if scaled else None
    config = NPURunConfig(model_dir=str(tmp_path), precision_mode=mode, **every_step)
    NPUEstimator(model_fn, config=config).train(input_fn)
    found = curves(tmp_path)
    assert found.pop("precision", None) == ({1: "float16"} if scaled else None)
    assert set(found) == (ALL if scaled else ALL - {"loss_scale", "skipped_steps"})
    norms = {1: 6.0, 3: 1.5, 4: 0.75}  # none of the second run
    assert found["gradient_norm"] == (pytest.approx(norms, rel=2**-10) if scaled else norms)  # in float16, if scaled
    assert found["loss"][1] == 9.0 and set(found["learning_rate"].values()) == {0.25}
    if scaled:
        assert found["skipped_steps"] == {1: 0.0, 2: 1.0, 3: 1.0, 4: 1.0}
        assert found["loss_scale"][1] == 1024.0 and found["loss_scale"][4] == pytest.approx(819.2)


def test_an_entry_every_few_steps_with_the_steps_per_second_between(tmp_path):
    hook = TensorBoardHook(str(tmp_path), every_n_steps=4, clock=stepping.Clock(per_look=2.0))
    stepping.run_steps([hook], [float(n) for n in range(10)], [n == 6 for n in range(10)], [8.0] * 10)
    found = curves(tmp_path)
    assert set(found["loss"].items()) == {(1, 0.0), (5, 4.0), (8, 8.0)}
    assert found["global_step/sec"] == {5: 2.0, 8: 2.0}, "4 steps in 2 s, the skipped one among them"
    assert "gradient_norm" not in found


@pytest.mark.parametrize("rate", [0.25, tf.keras.optimizers.schedules.ExponentialDecay(0.25, 1, 0.5)])
def test_keras_has_a_callback(tmp_path, rate):
    manager = ExponentialUpdateLossScaleManager(2**10, 1000)
    model = tf.keras.Sequential([tf.keras.layers.Input([1]), tf.keras.layers.Dense(1)])
    model.compile(npu_keras_optimizer(tf.keras.optimizers.SGD(rate), manager), "mse", metrics=["mae"])
    data = tf.data.Dataset.from_tensor_slices((np.ones([6, 1], np.float32), np.ones([6, 1], np.float32))).batch(1)
    clock = stepping.Clock(per_look=0.5)
    callback = TensorBoardCallback(str(tmp_path), every_n_steps=2, clock=clock)
    model.fit(data, epochs=2, verbose=0, callbacks=[callback], validation_data=data)
    found = curves(tmp_path)
    assert set(found) == ALL - {"gradient_norm"} | {"mae", "epoch_loss", "epoch_mae"}
    assert set(found["loss"]) == set(found["mae"]) == {1, 3, 5, 7, 9, 11}
    assert set(found["loss_scale"].values()) == {1024.0} and set(found["skipped_steps"].values()) == {0.0}
    assert found["global_step/sec"][3] == found["global_step/sec"][11] == 4.0
    assert found["learning_rate"][5] == (0.25 if rate == 0.25 else 0.25 * 0.5**4)  # of the step before its update
    history = model.history.history
    validation = curves(tmp_path / "validation")
    assert validation["epoch_loss"] == pytest.approx(dict(zip((6, 12), history["val_loss"])))
    assert found["epoch_mae"] == pytest.approx(dict(zip((6, 12), history["mae"])))
    assert set(validation) == {"epoch_loss", "epoch_mae"}


def test_a_report_has_the_curves_too_and_another_hook_does_not_double_them(tmp_path):
    hooks = [ReportHook(str(tmp_path), stream=io.StringIO()), TensorBoardHook(str(tmp_path))]
    stepping.run_steps(hooks, [float(n) for n in range(30)], [False] * 30, [8.0] * 30)
    found = curves(tmp_path)  # which sees a loss that is there twice
    assert list(found["loss"]) == [*range(1, 22), 23, 25, 27, 29, 30] and len(found["global_step/sec"]) == 25
    fitted = tmp_path / "fitted"
    model = tf.keras.Sequential([tf.keras.layers.Input([1]), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    ones = np.ones([4, 1])
    model.fit(ones, ones, verbose=0, callbacks=[ReportCallback(str(fitted))], validation_data=(ones, ones))
    assert {"loss", "epoch_loss"} < set(curves(fitted)) and set(curves(fitted / "validation")) == {"epoch_loss"}
    history = History(str(fitted / "history.jsonl"))
    assert history.evaluations[0].metrics["loss"] == pytest.approx(model.history.history["val_loss"][0])
    assert history.facts.parameters == 2 and history.facts.memory_bytes[0] > 10**8


def test_a_metric_with_a_number_for_each_class_is_left_out(tmp_path):
    model = tf.keras.Sequential([tf.keras.layers.Input([1]), tf.keras.layers.Dense(3)])
    model.compile("sgd", "mse", metrics=["mae", tf.keras.metrics.F1Score()])
    ones, classes = np.ones([4, 1], np.float32), np.eye(3, dtype=np.float32)[[0, 1, 2, 0]]
    model.fit(ones, classes, verbose=0, callbacks=[ReportCallback(str(tmp_path))], validation_data=(ones, classes))
    assert {"mae", "epoch_mae"} < set(curves(tmp_path)) and not [name for name in curves(tmp_path) if "f1" in name]


def test_an_error_loses_no_point(tmp_path):
    with pytest.raises(OverflowError), tf.Graph().as_default():
        step = tf1.train.get_or_create_global_step()
        train = tf1.assign_add(step, 1)
        with tf1.train.MonitoredTrainingSession(hooks=[ReportHook(str(tmp_path))]) as session:
            for _ in range(3):
                session.run(train)
            raise OverflowError
    assert list(curves(tmp_path)["memory_mb"]) == [1, 2, 3]


def test_an_error_in_fit_loses_no_point(tmp_path):
    def batches():
        yield from [(np.ones([1, 1], np.float32), np.ones([1, 1], np.float32))] * 3
        raise OverflowError

    model = tf.keras.Sequential([tf.keras.layers.Input([1]), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    data = tf.data.Dataset.from_generator(batches, output_signature=(tf.TensorSpec([1, 1]), tf.TensorSpec([1, 1])))
    with pytest.raises(tf.errors.OpError):
        model.fit(data, verbose=0, callbacks=[ReportCallback(str(tmp_path))])
    assert list(curves(tmp_path)["loss"]) == [1, 2, 3]


def test_validation_between_two_steps_does_not_make_them_slow(tmp_path):
    clock = stepping.Clock()
    model = tf.keras.Sequential([tf.keras.layers.Input([1]), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    ones = np.ones([4, 1])

    def moves(secs):
        return lambda batch, logs=None: setattr(clock, "now", clock.now + secs)

    # Half a second in each step, and a hundred in each batch of a validation.
    moving = tf.keras.callbacks.LambdaCallback(on_train_batch_begin=moves(0.5), on_test_batch_end=moves(100.0))
    curve = TensorBoardCallback(str(tmp_path), clock=clock)
    data = {"validation_data": (ones, ones), "batch_size": 1, "epochs": 3}
    model.fit(ones, ones, verbose=0, callbacks=[moving, curve], **data)
    assert set(curves(tmp_path)["global_step/sec"].values()) == {2.0}


def test_a_hundred_steps_and_an_evaluation_in_tensorboard(tmp_path):
    """By TensorBoard itself: it starts with what is installed here, and finds one curve for each number."""

    def input_fn():
        return tf.data.Dataset.range(1000).map(lambda n: tf.cast(n % 7, tf.float32)).batch(5)

    def model_fn(features, mode):
        weight = tf1.get_variable("weight", [], initializer=tf1.zeros_initializer())
        loss = tf.reduce_mean(tf.square(weight - features))
        optimizer = NPUOptimizer(
            tf1.train.AdamOptimizer(0.01), FixedLossScaleManager(8.0), is_distributed=True, is_loss_scale=True
        )
        train_op = optimizer.minimize(loss, tf1.train.get_global_step())
        return NPUEstimatorSpec(mode, loss=loss, train_op=train_op)

    estimator = NPUEstimator(model_fn, config=NPURunConfig(model_dir=str(tmp_path)))
    estimator.train(input_fn, max_steps=100)
    estimator.evaluate(input_fn, steps=2)

    board = program.TensorBoard(plugins=default.get_plugins())
    board.configure(logdir=str(tmp_path), port=0, load_fast="false", reload_interval=0.0)
    url = board.launch()
    names = {"loss", "global_step/sec", "samples_per_sec", *ALL}
    names = {name if name in ("loss", "global_step/sec") else f"training/{name}" for name in names}
    expected, found, give_up = {".": names, "eval": {"loss"}}, {}, time.monotonic() + 60
    while found != expected and time.monotonic() < give_up:
        with urllib.request.urlopen(f"{url}data/plugin/scalars/tags") as answer:
            found = {run: set(tags) for run, tags in json.load(answer).items()}
    assert found == expected
    for name in names:
        with urllib.request.urlopen(f"{url}data/plugin/scalars/scalars?run=.&tag={name}") as answer:
            steps = [step for _, step, _ in json.load(answer)]
        assert steps[0] == 1 + name.endswith("sec") and len(steps) >= 50 and len(set(steps)) == len(steps), name
        assert steps[-1] == (99 if name.endswith("norm") else 100), "a norm is computed in steps that are due"
