"""Hooks, optimizer and Estimator together: overflows of a real loss scale are seen, counted and kept."""

from __future__ import annotations

import io
import threading
import time

import pytest
import tensorflow as tf

from npu_bridge.estimator.npu.npu_config import NPURunConfig
from npu_bridge.estimator.npu.npu_estimator import NPUEstimator
from npu_bridge.estimator.npu.npu_loss_scale_manager import ExponentialUpdateLossScaleManager
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
from npu_bridge.reporting import History, HistoryHook, ProgressHook
from npu_bridge.reporting.history import HISTORY_FILE
from tests.reporting.stepping import Clock


def model_fn(features, labels, mode):
    weight = tf.compat.v1.get_variable("weight", initializer=0.5)
    loss = weight * 1024.0  # times a scale of 2^118 or more, the gradient is beyond float32
    manager = ExponentialUpdateLossScaleManager(2.0**120, 1000, decr_every_n_nan_or_inf=2, decr_ratio=0.5)
    optimizer = NPUOptimizer(
        tf.compat.v1.train.GradientDescentOptimizer(2.0**-20), loss_scale_manager=manager, is_loss_scale=True
    )
    train_op = optimizer.minimize(loss, tf.compat.v1.train.get_or_create_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def input_fn():
    return tf.data.Dataset.from_tensors({"nothing": 0.0}).repeat()


@pytest.fixture
def estimator(tmp_path):
    return tf.estimator.Estimator(model_fn, str(tmp_path / "model"))


def test_skipped_steps_of_a_settling_scale(estimator, tmp_path):
    out = io.StringIO()
    progress = ProgressHook(total_steps=3, every_n_steps=100, stream=out, clock=Clock())
    recorder = HistoryHook(str(tmp_path / "history.jsonl"))
    estimator.train(input_fn, hooks=[progress, recorder], max_steps=3)

    history = History(recorder.history.path)
    skipped = [(0, 2.0**exponent, True) for exponent in (120, 120, 119, 119, 118, 118)]
    applied = [(step, 2.0**117, False) for step in (1, 2, 3)]
    assert [(row.step, row.loss_scale, row.skipped) for row in history.rows] == [*skipped, *applied]
    assert [row.loss for row in history.rows][:7] == [512.0] * 7  # unscaled, and unmoved while skipping
    assert [row.loss for row in history.rows][7:] == [511.0, 510.0]
    assert progress.skipped_steps == 6
    assert out.getvalue().splitlines() == [
        "step skipped: gradients overflowed at loss scale 2^120; normal while a dynamic scale settles",
        "step 0/3 (0 %) | loss 512.00 | learning rate 9.537e-07 | loss scale 2^120 | skipped 1 step",
        "step 3/3 (100 %) | loss 510.00 | learning rate 9.537e-07 | loss scale 2^117 | skipped 6 steps",
    ]


class LeavesOut(tf.estimator.SessionRunHook):
    """Keeps the seconds that it must leave out."""

    def __init__(self):
        self.secs = []

    def exclude_secs(self, secs):
        self.secs.append(secs)


@pytest.mark.slow("an estimator for one number")
def test_the_time_of_evaluations_is_no_time_of_the_training(tmp_path):
    estimator = NPUEstimator(model_fn, config=NPURunConfig(model_dir=str(tmp_path), save_checkpoints_steps=2))
    training, taken = LeavesOut(), []

    def slow_input():
        began = time.monotonic()
        time.sleep(0.3)
        taken.append(time.monotonic() - began)
        return input_fn()

    tf.estimator.train_and_evaluate(
        estimator,
        tf.estimator.TrainSpec(input_fn, max_steps=5, hooks=[training]),
        tf.estimator.EvalSpec(slow_input, steps=1, throttle_secs=0, start_delay_secs=0),
    )
    assert len(training.secs) == len(taken) >= 2
    assert all(left_out > secs for left_out, secs in zip(training.secs, taken))


def test_an_evaluation_in_another_thread_takes_no_time_and_no_history_from_the_training(tmp_path):
    estimator = NPUEstimator(model_fn, config=NPURunConfig(model_dir=str(tmp_path), save_summary_steps=None))
    estimator.train(input_fn, steps=1)
    results = []

    class EvaluatesBeside(LeavesOut):
        def after_run(self, run_context, run_values):
            thread = threading.Thread(target=lambda: results.append(estimator.evaluate(input_fn, 1)))
            thread.start()
            thread.join()

    training = EvaluatesBeside()
    estimator.train(input_fn, hooks=[training], steps=1)
    assert results and training.secs == []
    assert len(History(str(tmp_path / HISTORY_FILE)).evaluations) == len(results)
    assert estimator._history.evaluations == []


def test_the_loss_shown_is_that_of_the_spec_where_a_script_scales_by_hand(tmp_path):
    def model_scaled_by_hand(features, mode):
        loss = tf.compat.v1.get_variable("weight", initializer=0.5) * 2.0
        optimizer = NPUOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.0))
        train_op = optimizer.minimize(loss * 512.0, tf.compat.v1.train.get_global_step())
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    recorder = HistoryHook(str(tmp_path / "history.jsonl"))
    estimator = NPUEstimator(model_scaled_by_hand, config=NPURunConfig(model_dir=str(tmp_path / "model")))
    estimator.train(input_fn, hooks=[recorder], max_steps=2)
    assert [row.loss for row in recorder.history.rows] == [1.0, 1.0]
