"""Every NPUEstimator leaves the page of its training; a script with a session of its own gets one by a hook."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import types

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.npu_init import (
    ExponentialUpdateLossScaleManager,
    FixedLossScaleManager,
    NPUEstimator,
    NPUEstimatorSpec,
    NPUOptimizer,
    NPURunConfig,
    npu_keras_optimizer,
)
from npu_bridge.reporting import CsvWriter, History, HistoryHook, MetricsCallback, ReportCallback, ReportHook
from npu_bridge.reporting.keras_numbers import OptimizerNumbers
from npu_bridge.reporting.report_hook import places_of_ranks
from npu_bridge.reporting.summary import StepTimes
from npu_bridge.session.precision import AccelerateTrainCallback
from tests.reporting.stepping import run_steps

tf1 = tf.compat.v1


def train(folder, hooks=(), max_steps=12, **options):
    def model_fn(features, mode):
        weight = tf1.get_variable("weight", [], initializer=tf1.zeros_initializer())
        loss = tf.square(weight - features)
        optimizer = NPUOptimizer(tf1.train.GradientDescentOptimizer(0.25), FixedLossScaleManager(8), is_loss_scale=True)
        return NPUEstimatorSpec(mode, loss=loss, train_op=optimizer.minimize(loss, tf1.train.get_global_step()))

    config = NPURunConfig(model_dir=str(folder), save_checkpoints_steps=6, **options)
    estimator = NPUEstimator(model_fn, config=config)
    estimator.train(lambda: tf.data.Dataset.from_tensors(3.0).repeat(), hooks=list(hooks), max_steps=max_steps)


def test_every_npu_estimator_makes_one(tmp_path):
    train(tmp_path, precision_mode="must_keep_origin_dtype")
    train(tmp_path, max_steps=20)
    history = History(str(tmp_path / "history.jsonl"))
    assert [row.step for row in history.rows] == list(range(1, 21)) and len(history.starts) == 2
    assert history.rows[0].loss == 9.0 and history.rows[0].learning_rate == 0.25 and history.rows[0].loss_scale == 8.0
    facts = json.loads((tmp_path / "report.json").read_text())
    assert facts["ranks"][0]["process"] == os.getpid()
    assert ["NPURunConfig.save_checkpoints_steps", "6"] in [row[:2] for row in facts["options"]]
    text = (tmp_path / "run.toml").read_text()
    assert "precision_mode" not in text and "session_config" not in text, "it is that of the second training"
    given = NPURunConfig(model_dir=str(tmp_path), save_checkpoints_steps=6)
    assert repr(NPURunConfig.from_file(tmp_path / "run.toml")) == repr(given)
    page = (tmp_path / "report.html").read_text()
    assert 'data-last-step="20"' in page and "NPURunConfig.save_checkpoints_steps" in page


def test_it_uses_the_history_that_is_recorded_anyhow(tmp_path):
    kept = tmp_path / "elsewhere" / "steps.jsonl"
    train(tmp_path / "run", [HistoryHook(str(kept))])
    assert not (tmp_path / "run" / "history.jsonl").exists()
    assert json.loads((tmp_path / "run" / "report.json").read_text())["history"] == "../elsewhere/steps.jsonl"
    assert 'data-last-step="12"' in (tmp_path / "run" / "report.html").read_text()


def test_a_history_that_another_hook_begins_later_is_written(tmp_path):
    recorder = HistoryHook(str(tmp_path / "steps.jsonl"))
    run_steps([ReportHook(str(tmp_path), recorder.history, stream=io.StringIO()), recorder], [3.0, 2.0])
    kept = History(str(tmp_path / "steps.jsonl"))
    assert len(kept.rows) == 2 and kept.facts.memory_bytes


def test_nothing_where_nothing_is_to_be_shown(tmp_path, capsys):
    train(tmp_path, log_step_count_steps=None)
    assert not [name for name in os.listdir(tmp_path) if name.startswith(("report", "history"))]
    assert "page" not in "".join(capsys.readouterr())


def test_where_the_page_is_comes_as_a_plain_line_below_the_progress(tmp_path, capsys):
    train(tmp_path / "estimator")
    lines = capsys.readouterr().err.splitlines()
    (progress,) = (index for index, line in enumerate(lines) if line.startswith("step 12/12 (100 %)"))
    *steps, pace, memory, last = lines[progress + 1 :]
    about = r"trained 12 steps in [\d.]+ m?s \| loss \S+ -> \S+ \(mean of the last 10 steps\) \| skipped 0 steps"
    assert re.fullmatch(about, " | ".join(line.strip() for line in steps))
    assert re.fullmatch(r"median step [\d.]+ m?s, worst [\d.]+ m?s \| .*", pace)
    assert re.fullmatch(r"peak memory \d\.\d\d GB on rank 0", memory)
    assert last == f"report file://{tmp_path}/estimator/report.html"
    run_steps([ReportHook(str(tmp_path / "a session"))], [3.0, 2.0])
    assert capsys.readouterr().out.splitlines()[-1] == f"report file://{tmp_path}/a%20session/report.html"


@pytest.mark.parametrize("verbose", [0, 2])
def test_keras_says_where_the_page_is_unless_it_is_to_say_nothing(tmp_path, capsys, verbose):
    model = tf.keras.Sequential([tf.keras.layers.Input([1]), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(np.ones([2, 1]), np.ones([2, 1]), verbose=verbose, callbacks=[ReportCallback(str(tmp_path))])
    said = f"report file://{tmp_path}/report.html"
    assert capsys.readouterr().out.splitlines()[-1:] == ([said] if verbose else [])
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize("scope", [contextlib.nullcontext, lambda: tf.distribute.MirroredStrategy(["CPU:0"]).scope()])
def test_each_batch_of_an_execution_counts(scope, tmp_path, monkeypatch):
    in_runs, entries = [], []
    monkeypatch.setattr(StepTimes, "add", lambda self, secs, steps: in_runs.append(steps))
    writer = types.SimpleNamespace(begin=print, write=lambda step, *_: entries.append(step), close=lambda: None)
    with scope():
        model = tf.keras.Sequential([tf.keras.layers.Input([1]), tf.keras.layers.Dense(1)])
        model.compile("sgd", "mse", steps_per_execution=4)
    callbacks = [ReportCallback(str(tmp_path)), MetricsCallback(writer, every_n_steps=4)]
    model.fit(np.ones([10, 1]), np.ones([10, 1]), batch_size=1, epochs=2, verbose=0, callbacks=callbacks)
    assert in_runs == [4, 4, 2, 4, 4, 2]
    assert entries == [4, 8, 10, 18, 20], "the fourth execution ends two steps after an entry"


def test_a_second_fit_after_another_compile_continues_the_report(tmp_path):
    callbacks = [ReportCallback(str(tmp_path)), MetricsCallback(CsvWriter(tmp_path / "numbers.csv"), 1)]
    ones = np.ones([3, 1])
    for number_of_model in range(2):
        model = tf.keras.Sequential([tf.keras.layers.Input([1]), tf.keras.layers.Dense(1)])
        for _ in range(2 - number_of_model):
            model.compile("sgd", "mse")
            model.fit(ones, ones, batch_size=1, verbose=0, callbacks=callbacks, validation_data=(ones, ones))
        history, steps = History(str(tmp_path / "history.jsonl")), 6 - 3 * number_of_model
        assert [row.step for row in history.rows] == [*range(1, steps + 1)], "another model is another training"
        assert [each.step for each in history.evaluations] == [*range(3, steps + 1, 3)]
        assert (tmp_path / "numbers.csv").read_text().count("\n") == steps + 1


def test_steps_of_a_model_with_optimizers_of_its_own_are_their_updates(tmp_path):
    class Gan(tf.keras.Model):
        def compile(self, optimizer):
            super().compile()
            self.own, self.weight = optimizer, tf.Variable(1.0)

        def train_step(self, data):
            self.own.apply_gradients([(tf.constant(1.0), self.weight)])
            return {"loss": self.weight}

    gan, report = Gan(), ReportCallback(str(tmp_path))
    gan.compile(tf.keras.optimizers.SGD())
    for _ in range(2):
        gan.fit(np.ones([4, 1]), batch_size=1, verbose=0, callbacks=[report])
    assert [row.step for row in History(str(tmp_path / "history.jsonl")).rows] == [*range(1, 9)]


def test_what_keras_restores_after_callbacks_have_begun_goes_on(tmp_path):
    ones, told = np.ones([4, 1]), {}
    read_progress = tf.keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: told.update(os.environ))
    for epochs in (2, 3):
        model = tf.keras.Sequential([tf.keras.layers.Input([1]), tf.keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        callbacks = [ReportCallback(str(tmp_path)), MetricsCallback(CsvWriter(tmp_path / "numbers.csv"), 1)]
        callbacks += [AccelerateTrainCallback("fast|step|0.5"), read_progress]
        callbacks += [tf.keras.callbacks.BackupAndRestore(str(tmp_path / "backup"), delete_checkpoint=False)]
        model.fit(ones, ones, batch_size=1, epochs=epochs, verbose=0, callbacks=callbacks)
    assert [row.step for row in History(str(tmp_path / "history.jsonl")).rows] == [*range(1, 13)]
    assert told["TOTAL_STEP"] == told["STEP_NOW"] == "12"
    lines = (tmp_path / "numbers.csv").read_text().splitlines()[1:]
    assert [int(line.split(",")[0]) for line in lines] == [*range(1, 13)]


def test_a_file_of_options_that_is_somebody_elses_stays(tmp_path, caplog):
    (tmp_path / "run.toml").write_text("mine = 1")
    with caplog.at_level("WARNING", logger="npu_bridge"):
        run_steps([ReportHook(str(tmp_path))], [3.0, 2.0], [False, False], [4.0, 4.0])
    assert (tmp_path / "run.toml").read_text() == "mine = 1" and (tmp_path / "report.html").exists()
    (record,) = caplog.records
    assert "run.toml, this training's options, is not written" in record.getMessage()


def test_a_page_that_cannot_be_written_ends_no_training(tmp_path, caplog):
    (tmp_path / "report.html").mkdir()
    (tmp_path / "report.json").mkdir()
    with caplog.at_level("WARNING", logger="npu_bridge"):
        run_steps([ReportHook(str(tmp_path))], [3.0, 2.0], [False, False], [4.0, 4.0])
    assert len(History(str(tmp_path / "history.jsonl")).rows) == 2
    assert [record.getMessage()[:25] for record in caplog.records] == ["the page of this training"]  # told once


def test_keras_has_a_callback(tmp_path):
    manager = ExponentialUpdateLossScaleManager(2**10, 1000, decr_every_n_nan_or_inf=1, decr_ratio=0.5)
    model = tf.keras.Sequential([tf.keras.layers.Input([1]), tf.keras.layers.Dense(1)])
    model.compile(npu_keras_optimizer(tf.keras.optimizers.SGD(0.25), manager), "mse")
    features = np.array([[1.0], [1.0], [np.inf], [1.0]], np.float32)
    data = tf.data.Dataset.from_tensor_slices((features, np.ones([4, 1], np.float32))).batch(1)
    model.fit(data, verbose=0, callbacks=[ReportCallback(str(tmp_path))])
    rows = History(str(tmp_path / "history.jsonl")).rows
    assert [(row.step, row.loss_scale, row.skipped) for row in rows] == [
        (1, 1024.0, False),
        (2, 1024.0, False),
        (2, 1024.0, True),
        (3, 512.0, False),
    ]
    assert {row.learning_rate for row in rows} == {0.25}
    assert 'data-last-step="3"' in (tmp_path / "report.html").read_text()


def test_of_several_loss_scales_the_smallest_is_shown():
    managers = [FixedLossScaleManager(8.0), FixedLossScaleManager(4.0)]
    assert OptimizerNumbers.of(npu_keras_optimizer(tf.keras.optimizers.SGD(0.25), managers)).loss_scale == 4.0


def test_a_tf_train_optimizer_inside_keras_has_no_rate_to_read():
    with tf.Graph().as_default():
        numbers = OptimizerNumbers.of(tf.keras.optimizers.get(tf1.train.AdamOptimizer(0.5)))
        assert numbers == OptimizerNumbers(step=0, loss_scale=None, skipped_steps=None, learning_rate=None)


def printed(folder):
    """On a rank: what a training with a page prints."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        run_steps([ReportHook(folder, ranks=places_of_ranks())], [3.0, 2.0])
    return output.getvalue()


def test_rank_0_alone_says_where_the_page_is(on_ranks, tmp_path):
    said, nothing = on_ranks(2, printed, str(tmp_path))
    *_, memory, last = said.splitlines()
    assert re.fullmatch(r"peak memory [\d.]+ GB on rank 0, [\d.]+ GB on rank 1", memory)
    assert last == f"report file://{tmp_path}/report.html" and nothing == ""
    assert sorted(History(str(tmp_path / "history.jsonl")).facts.memory_bytes) == [0, 1]


def train_two_in_turn(folder):
    """On a rank: the weights of two optimizers that train in turn, with runs between that do not train."""
    with tf.Graph().as_default():
        weights = [tf1.get_variable(f"w{n}", [], initializer=tf1.zeros_initializer()) for n in range(2)]
        step, train_ops = tf1.train.get_or_create_global_step(), []
        for weight in weights:
            batch = tf.cast(tf1.data.make_one_shot_iterator(tf.data.Dataset.range(1, 9)).get_next(), tf.float32)
            loss = weight * batch * (1.0 + collective.current().rank)
            inner, manager = tf1.train.GradientDescentOptimizer(1.0), FixedLossScaleManager(8)
            optimizer = NPUOptimizer(inner, manager, is_distributed=True, is_loss_scale=True)
            train_ops.append(optimizer.minimize(loss, step))
        with tf1.train.MonitoredTrainingSession(hooks=[ReportHook(folder)]) as session:
            for train_op in 3 * train_ops:
                session.run(train_op)
                session.run(step)
            return [float(each) for each in session.run(weights)]


def test_runs_exchange_only_what_they_exchange_without_the_hook(on_ranks, tmp_path):
    assert on_ranks(2, train_two_in_turn, str(tmp_path)) == [[-1.5 * (1 + 2 + 3)] * 2] * 2
    assert [row.step for row in History(str(tmp_path / "history.jsonl")).rows] == [1, 2, 3, 4, 5, 6]
