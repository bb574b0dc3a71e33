"""Numbers of a training in a CSV file, in MLflow and in Weights & Biases, as these read them back."""

from __future__ import annotations

import csv
import glob
import math
import types

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.estimator.npu.npu_loss_scale_manager import ExponentialUpdateLossScaleManager
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
from npu_bridge.reporting import (
    CsvWriter,
    HistoryHook,
    MetricsCallback,
    MetricsHook,
    MissingExtraError,
    MlflowWriter,
    TensorBoardHook,
    WandbWriter,
)
from npu_bridge.session.precision import PrecisionSummaryHook
from npu_bridge.stages import Accumulate
from tests.reporting.stepping import Clock, run_steps


def train(writer, losses=(4.0, 3.0, math.nan, 2.0, 1.0), every_n_steps=1):
    """The third step is skipped; a step takes half a second."""
    hook = MetricsHook(writer, every_n_steps, clock=Clock(per_look=0.5))
    run_steps([hook], list(losses), [number == 2 for number in range(len(losses))], [8.0] * len(losses))


def numbers_in(path):
    with open(path, newline="") as file:
        return [{name: text for name, text in row.items() if text} for row in csv.DictReader(file)]


def test_csv_holds_what_is_known_and_finite(tmp_path):
    path = tmp_path / "deep" / "numbers.csv"
    train(CsvWriter(path))
    rows = numbers_in(path)
    assert rows[0] == {"step": "1", "loss": "4", "loss_scale": "8", "skipped_steps": "0"}
    assert rows[2] == {"step": "2", "loss_scale": "8", "skipped_steps": "1", "steps_per_sec": "2"}
    assert [row["step"] for row in rows] == ["1", "2", "2", "3", "4"]


def test_steps_skipped_in_a_lost_session_are_not_counted_twice(tmp_path):
    class LoseOnce(tf.estimator.SessionRunHook):
        runs = 0

        def after_run(self, run_context, run_values):
            self.runs += 1
            if self.runs == 3:
                raise tf.errors.AbortedError(None, None, "lost")

    run_steps([MetricsHook(CsvWriter(tmp_path / "n.csv"), 1), LoseOnce()], [1.0] * 6, [False, True] + [False] * 4)
    assert numbers_in(tmp_path / "n.csv")[-1]["skipped_steps"] == "1"


def test_samples_a_second_are_those_of_skipped_steps_too():
    kept = []
    writer = types.SimpleNamespace(begin=print, write=lambda step, values, _: kept.append(values), close=lambda: None)
    hook = MetricsHook(writer, 1, clock=Clock(per_look=0.5))
    with tf.Graph().as_default():
        rows = tf.data.Dataset.from_tensors(np.zeros([5, 2], np.float32)).repeat()
        iterator = tf.compat.v1.data.make_initializable_iterator(rows)
        tf.compat.v1.add_to_collection(tf.compat.v1.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
        weight = tf.compat.v1.get_variable("weight", initializer=1.0)
        loss = weight * 2.0**11 + tf.reduce_sum(iterator.get_next())
        manager = ExponentialUpdateLossScaleManager(2.0**119, 1000, 1, 2, 0.5)
        optimizer = NPUOptimizer(tf.compat.v1.train.GradientDescentOptimizer(2.0**-20), manager, is_loss_scale=True)
        train_op = optimizer.minimize(loss, tf.compat.v1.train.get_or_create_global_step())
        with tf.compat.v1.train.MonitoredSession(hooks=[hook]) as session:
            for _ in range(8):
                session.run(train_op)
    assert kept[-1]["skipped_steps"] == 3
    assert [values["samples_per_sec"] for values in kept[1:]] == [10.0] * 7


@pytest.mark.parametrize(("every_n_steps", "norms"), [(1, [None, "3", None, "3"]), (2, ["3", "3"])])
def test_the_norm_of_accumulated_gradients_is_in_the_last_entry_of_their_update(tmp_path, every_n_steps, norms):
    with tf.Graph().as_default():
        loss = 3.0 * tf.compat.v1.get_variable("weight", initializer=1.0)
        optimizer = NPUOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1), stages=[Accumulate(2)])
        train_op = optimizer.minimize(loss, tf.compat.v1.train.get_or_create_global_step())
        hook = MetricsHook(CsvWriter(tmp_path / "numbers.csv"), every_n_steps, clock=Clock(per_look=3.0))
        with tf.compat.v1.train.MonitoredSession(hooks=[hook]) as session:
            for _ in range(4):
                session.run(train_op)
    assert [row.get("gradient_norm") for row in numbers_in(tmp_path / "numbers.csv")] == norms


def test_csv_goes_on_from_a_checkpoint(tmp_path):
    path = tmp_path / "numbers.csv"
    writer = CsvWriter(path)
    writer.begin(0)
    for step in (10, 20, 30):
        writer.write(step, {"loss": 1.0 / step}, None)
    with open(path, "a") as file:
        file.write("40,0.0")  # the process died in the middle of a line
    writer.begin(20)
    writer.write(25, {"loss": 5.0, "unheard_of": 1.0}, "float16")
    writer.close()
    assert [(row["step"], row["loss"]) for row in numbers_in(path)] == [("10", "0.1"), ("20", "0.05"), ("25", "5")]
    assert numbers_in(path)[-1]["precision"] == "float16"


def test_a_table_with_a_column_of_its_own_is_left_alone(tmp_path):
    table = tmp_path / "numbers.csv"
    table.write_text("step,loss,loss_scale,skipped_steps,accuracy\n1,2,3,4,5\n")
    with pytest.raises(FileExistsError, match="npu_bridge did not make"):
        CsvWriter(table).begin(0)
    assert table.read_text().endswith("1,2,3,4,5\n")


@pytest.mark.parametrize("kind", [MetricsHook, MetricsCallback, HistoryHook, TensorBoardHook, PrecisionSummaryHook])
def test_intervals_are_checked(kind, tmp_path):
    with pytest.raises(ValueError, match=f"{kind.__name__}: every_n_steps is out of range.*got 0"):
        kind(str(tmp_path / "numbers"), 0)


@pytest.mark.parametrize("kind, package", [(MlflowWriter, "mlflow"), (WandbWriter, "wandb")])
def test_a_missing_package_is_named(kind, package, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"{kind.__name__}: {package} is not installed.*\[{package}\]"):
        kind()


def test_a_package_that_is_installed_and_broken_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "mlflow.py").write_text("import a_module_that_mlflow_needs")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "mlflow", raising=False)
    with pytest.raises(MissingExtraError, match=r"mlflow cannot be imported \(No module named 'a_module_that_mlflow_n"):
        MlflowWriter()


def test_mlflow_has_the_numbers_in_a_store_of_files(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # asked for by MLflow 3
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed")
    mlflow.set_tracking_uri(f"file://{tmp_path}/runs")
    train(MlflowWriter(run_name="own"))
    assert mlflow.active_run() is None, "its own run has ended"
    client = mlflow.tracking.MlflowClient()
    (run,) = client.search_runs(["0"])
    assert run.info.run_name == "own" and run.info.status == "FINISHED"
    losses = client.get_metric_history(run.info.run_id, "training/loss")
    assert sorted((metric.step, metric.value) for metric in losses) == [(1, 4.0), (2, 3.0), (3, 2.0), (4, 1.0)]
    with mlflow.start_run(run_name="of the script") as active:
        train(MlflowWriter())
        assert mlflow.active_run() is not None, "the script's run continues"
    assert client.get_run(active.info.run_id).data.metrics["training/loss_scale"] == 8.0


def test_wandb_works_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed")
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    import wandb

    train(WandbWriter(project="tests", dir=str(tmp_path)))
    assert wandb.run is None, "its own run has ended"
    (file,) = glob.glob(f"{tmp_path}/wandb/offline-run-*/*.wandb")
    content = open(file, "rb").read()  # noqa: SIM115
    assert b"training/loss_scale" in content and b"training/step" in content
