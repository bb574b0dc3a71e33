"""`NPURunConfig(iterations_per_loop=N)`: what a training in loops leaves behind, and what its hooks see."""

from __future__ import annotations

import io
import os

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.estimator.npu.npu_config import NPURunConfig
from npu_bridge.estimator.npu.npu_estimator import NPUEstimator, NPUEstimatorSpec
from npu_bridge.estimator.npu.npu_loss_scale_manager import ExponentialUpdateLossScaleManager
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
from npu_bridge.reporting import History, HistoryHook, ProgressHook
from tests.reporting.stepping import Clock
from tests.training import OPTIMIZERS, assert_same_bits

tf1 = tf.compat.v1
OVERFLOWING = 12


def model_fn(features, labels, mode):
    kernel = tf1.get_variable("kernel", [4, 1], initializer=tf1.random_normal_initializer(seed=1))
    predictions = tf.matmul(features, kernel)
    if mode == tf.estimator.ModeKeys.PREDICT:
        return NPUEstimatorSpec(mode, predictions={"value": predictions, "first": features[:, 0]})
    loss = tf.reduce_mean(tf.square(predictions - labels), name="the_loss")
    metrics = {"batches": tf1.metrics.mean(1.0)}
    manager = ExponentialUpdateLossScaleManager(1024, 3, 1, 2, 0.5)
    optimizer = NPUOptimizer(OPTIMIZERS["adam"](), loss_scale_manager=manager, is_loss_scale=True)
    tf1.summary.scalar("summarized", loss)
    train_op = optimizer.minimize(loss, tf1.train.get_or_create_global_step())
    return NPUEstimatorSpec(mode, loss=loss, train_op=train_op, eval_metric_ops=metrics)


def input_fn(batches=40):
    features = np.random.RandomState(5).randn(4 * batches, 4).astype("f")
    labels = np.sum(features, axis=1, keepdims=True)
    if batches > OVERFLOWING:
        features[4 * OVERFLOWING, 0] = np.inf  # the loss is infinite, but not NaN
    return tf.data.Dataset.from_tensor_slices((features, labels)).batch(4)


class Seen(tf.estimator.SessionRunHook):
    """The global step before and after every run."""

    def __init__(self):
        self.steps = []

    def before_run(self, run_context):
        train_op, _ = run_context.original_args.fetches
        self.trained = train_op.name
        self.before = self._step(run_context)
        return tf.estimator.SessionRunArgs("the_loss:0")

    def after_run(self, run_context, run_values):
        self.loss = run_values.results
        self.steps.append((self.before, self._step(run_context)))

    def _step(self, run_context):
        return int(run_context.session.run(tf1.train.get_global_step(run_context.session.graph)))


def estimator(folder, loop, **options):
    options = {"save_checkpoints_steps": 10, "log_step_count_steps": None, **options}
    return NPUEstimator(model_fn, config=NPURunConfig(model_dir=str(folder), iterations_per_loop=loop, **options))


def variables_of(trained):
    return {name: trained.get_variable_value(name) for name in trained.get_variable_names()}


def checkpoints_of(folder):
    names = [name for name in os.listdir(folder) if name.endswith(".index")]
    return sorted(int(name.removeprefix("model.ckpt-").removesuffix(".index")) for name in names)


def summaries_in(folder, tag):
    events = [name for name in os.listdir(folder) if name.startswith("events")]
    found = []
    for name in events:
        for event in tf1.train.summary_iterator(os.path.join(folder, name)):
            found.extend(event.step for value in event.summary.value if value.tag == tag)
    return found


def test_loops_leave_the_checkpoint_of_single_steps(tmp_path):
    seen, looped = Seen(), estimator(tmp_path / "looped", 5)
    looped.train(input_fn, hooks=[seen], max_steps=20)
    assert seen.steps == [(0, 5), (5, 10), (10, 14), (14, 19), (19, 24)]  # one step is skipped
    assert checkpoints_of(tmp_path / "looped") == [0, 10, 24]
    assert seen.trained == "IterationOp"
    loss, seen = seen.loss, Seen()
    single = estimator(tmp_path / "single", 1)
    single.train(lambda: input_fn().take(25), hooks=[seen])
    assert_same_bits(variables_of(looped), variables_of(single))
    assert loss == seen.loss


def test_whole_loops_are_trained_and_told(tmp_path, caplog):
    seen, trained = Seen(), estimator(tmp_path, 4)
    trained.train(input_fn, hooks=[seen], max_steps=6)
    assert seen.steps == [(0, 4), (4, 8)]
    assert "got 6. Use 8" in caplog.text
    caplog.clear()
    trained.train(input_fn, steps=4, hooks=[seen])  # resumed
    assert seen.steps[2:] == [(8, 12)]
    assert "the last loop" not in caplog.text


def test_data_that_ends_in_a_loop_ends_the_training_normally(tmp_path):
    out, trained = io.StringIO(), estimator(tmp_path, 5)
    progress = ProgressHook(stream=out, every_n_steps=1)
    trained.train(lambda: input_fn(batches=8), hooks=[progress])
    assert trained.get_variable_value("global_step") == 8
    assert checkpoints_of(tmp_path)[-1] == 8
    single = estimator(tmp_path / "single", 1)
    single.train(lambda: input_fn(batches=8))
    assert_same_bits(variables_of(trained), variables_of(single))
    assert out.getvalue().splitlines()[-1].startswith("step 8 ")


def test_summaries_and_checkpoints_come_after_loops(tmp_path):
    trained = estimator(tmp_path, 4, save_checkpoints_steps=6, save_summary_steps=4, log_step_count_steps=8)
    trained.train(lambda: input_fn(batches=12), max_steps=12)
    assert checkpoints_of(tmp_path) == [0, 8, 12]
    assert summaries_in(tmp_path, "summarized")[0] == 4
    assert set(summaries_in(tmp_path, "summarized")) <= {4, 8, 12}
    assert set(summaries_in(tmp_path, "global_step/sec")) <= {8, 12}


def test_evaluation_and_prediction_take_one_batch_at_a_time(tmp_path):
    trained = estimator(tmp_path, 4)
    trained.train(lambda: input_fn(batches=8), max_steps=8)
    assert trained.evaluate(lambda: input_fn(batches=8), steps=3)["global_step"] == 8
    predicted = [row["first"] for row in trained.predict(lambda: input_fn(batches=8))]
    np.testing.assert_array_equal(predicted, np.random.RandomState(5).randn(32, 4).astype("f")[:, 0])
    assert trained.get_variable_value("global_step") == 8


def test_progress_and_history_count_steps_not_runs(tmp_path):
    out, history = io.StringIO(), str(tmp_path / "history.jsonl")
    clock = Clock()
    progress = ProgressHook(total_steps=40, every_n_steps=10, stream=out, clock=clock)

    class Tick(tf.estimator.SessionRunHook):
        def before_run(self, run_context):
            clock.now += 0.5

    trained = estimator(tmp_path, 5)
    hooks = [Tick(), progress, HistoryHook(history, every_n_steps=10)]
    trained.train(lambda: input_fn().skip(OVERFLOWING + 1).repeat(2), hooks=hooks, max_steps=40)
    assert [line.split(" (")[0] for line in out.getvalue().splitlines()] == [
        "step 5/40",
        "step 15/40",
        "step 25/40",
        "step 35/40",
        "step 40/40",
    ]
    assert progress.steps_per_sec == pytest.approx(10.0)
    assert [row.step for row in History(history).rows] == [5, 15, 25, 35]


def test_mixed_computing_goes_with_single_steps_alone():
    with pytest.raises(ValueError, match="iterations_per_loop"):
        NPURunConfig(iterations_per_loop=2, mix_compile_mode=True)
