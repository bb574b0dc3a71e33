"""A training that only skips steps says so once, whatever it is made with."""

from __future__ import annotations

import io

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import amp
from npu_bridge.base.errors import LONGEST_MESSAGE
from npu_bridge.gradients.steps.skips_in_a_row import SkipsInARow
from npu_bridge.npu_init import (
    FixedLossScaleManager,
    NPUOptimizer,
    NPURunConfig,
    npu_callbacks_append,
    npu_keras_optimizer,
)
from npu_bridge.reporting import HistoryHook, LossScaleCollapseHook, ProgressHook, ReportCallback
from npu_bridge.stages import Accumulate
from tests.reporting.stepping import run_steps

tf1 = tf.compat.v1
SAID = "loss scale: more than 100 steps in a row were skipped, so nothing is trained"
IN_VAIN = "loss scale: 10 steps in a row were skipped, and no loss scale helps"


def warnings_in(caplog, beginning=SAID):
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith(beginning)]


@pytest.mark.parametrize(
    "skipped, scales, told",
    [
        ([True] * 101, [8.0] * 101, 1),
        ([True] * 101, None, 1),
        ([True] * 100, [8.0] * 100, 0),
        ([*[True] * 60, False, *[True] * 60], [8.0] * 121, 0),
        ([True] * 150, [*[8.0] * 75, *[4.0] * 75], 0),
    ],
)
def test_hooks_tell_it_once(skipped, scales, told, tmp_path, caplog):
    hooks = [ProgressHook(stream=io.StringIO()), HistoryHook(str(tmp_path / "history.jsonl"))]
    run_steps(hooks, [1.0] * len(skipped), skipped, scales)
    said = warnings_in(caplog)
    assert len(said) == told and all(len(text) < LONGEST_MESSAGE for text in said)
    assert all(("at a loss scale of 8." in text) == (scales is not None) for text in said)
    assert all("DynamicLossScaleManager.apex()" in text and "LossScaleCollapseHook" in text for text in said)


@pytest.mark.parametrize(
    "skipped, scales, loss, told",
    [
        ([True] * 10, [2.0**-step for step in range(10)], 1.0, 1),
        ([True] * 10, [2.0 ** (40 - step) for step in range(10)], np.nan, 1),
        ([True] * 20, [2.0 ** (40 - step) for step in range(20)], 1.0, 0),
        ([*[True] * 9, False] * 2, [1.0] * 20, np.nan, 0),
    ],
)
def test_skips_that_no_scale_prevents_are_told_early(skipped, scales, loss, told, tmp_path, caplog):
    run_steps([HistoryHook(str(tmp_path / "history.jsonl"))], [loss] * len(skipped), skipped, scales)
    said = warnings_in(caplog, IN_VAIN)
    assert len(said) == told and all(len(text) < LONGEST_MESSAGE for text in said)


@pytest.mark.parametrize("hooks, advice", [([], "Add a npu_bridge"), ([LossScaleCollapseHook()], "If the next steps")])
def test_a_hook_that_is_there_is_not_advised(hooks, advice, tmp_path, caplog):
    run_steps([HistoryHook(str(tmp_path / "history.jsonl")), *hooks], [np.nan] * 10, [True] * 10, [1.0] * 10)
    (said,) = warnings_in(caplog, IN_VAIN)
    assert f"16 bits. {advice}" in said


def test_a_smaller_scale_is_not_advised_at_a_scale_of_1(tmp_path, caplog):
    run_steps([HistoryHook(str(tmp_path / "history.jsonl"))], [1.0] * 101, [True] * 101, [1.0] * 101)
    (said,) = warnings_in(caplog)
    assert "If the scale is too high" not in said and "LossScaleCollapseHook" in said


@pytest.mark.parametrize("rate, told", [(1e30, 1), (0.01, 0)])
def test_keras_tells_of_a_loss_that_is_nan_where_no_step_is_skipped(rate, told, caplog):
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=[2])])
    model.compile(npu_keras_optimizer(tf.keras.optimizers.SGD(rate)), "mse")
    model.fit(np.ones([12, 2]), np.zeros([12, 1]), batch_size=1, verbose=0, callbacks=npu_callbacks_append([]))
    assert len(warnings_in(caplog, "loss: it is NaN. Expected a number; got NaN in fit.")) == told


@pytest.mark.parametrize("steps", [1, 4])
def test_keras_tells_it_after_ten_steps_however_many_an_execution_has(steps, caplog):
    told, model = {}, tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=[2])])
    model.compile(npu_keras_optimizer(tf.keras.optimizers.SGD(1e30)), "mse", steps_per_execution=steps)
    callbacks = npu_callbacks_append([])
    note = tf.keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: told.update({batch: len(warnings_in(caplog, "loss: it is NaN."))})
    )
    model.fit(np.ones([16, 2]), np.zeros([16, 1]), batch_size=1, verbose=0, callbacks=[*callbacks, note])
    assert len(told) == 16 // steps and told == {batch: int(batch >= 9) for batch in told}


def test_keras_tells_of_gradients_that_wait_for_more_batches(caplog):
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=[2])])
    model.compile(npu_keras_optimizer(tf.keras.optimizers.SGD(0.1), stages=[Accumulate(4)]), "mse")
    for batches in (8, 6):
        assert warnings_in(caplog, "fit: the gradients of") == []
        model.fit(np.ones([batches, 2]), np.ones([batches, 1]), 1, verbose=0, callbacks=npu_callbacks_append([]))
    (said,) = warnings_in(caplog, "fit: the gradients of")
    assert said.startswith("fit: the gradients of 2 batches are not applied yet.")


def test_keras_tells_early_that_a_row_of_attention_is_masked(caplog):
    """In O1 the mask is -Inf, and of a row of nothing else the maximum cannot be subtracted."""
    layers = tf.keras.layers
    values, kept = layers.Input([6, 8]), layers.Input([6])
    scores = layers.Dense(6)(values) + (1 - kept[:, None, :]) * -1e9
    attended = layers.Dot([2, 1])([layers.Softmax()(scores), values])
    levels = amp.configure("O1", tf.keras.optimizers.SGD(0.01), tf.keras.Model([values, kept], attended))
    levels.model.compile(levels.optimizer, "mse")
    data = [np.ones([20, 6, 8], np.float32), np.zeros([20, 6], np.float32)]
    levels.model.fit(data, data[0], batch_size=1, verbose=0, callbacks=npu_callbacks_append([]))
    assert int(levels.optimizer.skipped_steps) == 20
    (said,) = warnings_in(caplog, IN_VAIN)
    assert "got a loss of nan at a loss scale of" in said
    assert "LossScaleCollapseHook" not in said, "fit has no hooks"


@pytest.mark.parametrize("batches", [1, 2])
def test_a_plain_estimator_tells_it_without_a_hook(batches, tmp_path, caplog):
    def model_fn(features, mode):
        weight = tf1.get_variable("weight", [], initializer=tf1.ones_initializer())
        loss = weight * features
        inner, stages = tf1.train.GradientDescentOptimizer(0.1), [Accumulate(batches)] if batches > 1 else []
        optimizer = NPUOptimizer(inner, FixedLossScaleManager(8), is_loss_scale=True, stages=stages)
        train_op = optimizer.minimize(loss, tf1.train.get_global_step())
        return tf.estimator.EstimatorSpec(mode, loss=tf.ones([]), train_op=train_op)

    config = NPURunConfig(model_dir=str(tmp_path), save_checkpoints_steps=10**6)
    estimator = tf.estimator.Estimator(model_fn, config=config)
    estimator.train(lambda: tf.data.Dataset.from_tensors(np.float32(np.inf)).repeat(101 * batches))
    assert len(warnings_in(caplog)) == len(warnings_in(caplog, IN_VAIN)) == 1


@pytest.mark.parametrize("batches", [1, 2])
def test_keras_tells_it(batches, tmp_path, caplog):
    model = tf.keras.Sequential([tf.keras.layers.Input([1]), tf.keras.layers.Dense(1)])
    inner, stages = tf.keras.optimizers.SGD(0.25), [Accumulate(batches)] if batches > 1 else []
    model.compile(npu_keras_optimizer(inner, FixedLossScaleManager(8), stages=stages), "mse")
    data = tf.data.Dataset.from_tensors((np.full([1, 1], np.inf, np.float32), np.ones([1, 1], np.float32)))
    callbacks = [ReportCallback(str(tmp_path))]
    model.fit(data.repeat(100 * batches), verbose=0, callbacks=callbacks)
    assert warnings_in(caplog) == []
    model.fit(data.repeat(101 * batches), verbose=0, callbacks=callbacks)
    (said,) = warnings_in(caplog)
    assert "at a loss scale of 8." in said


def test_executions_with_one_skipped_step_of_two_are_no_cause_for_alarm(tmp_path, caplog):
    model = tf.keras.Sequential([tf.keras.layers.Input([1]), tf.keras.layers.Dense(1)])
    optimizer = npu_keras_optimizer(tf.keras.optimizers.SGD(0.0), FixedLossScaleManager(8))
    model.compile(optimizer, "mse", steps_per_execution=2)
    rows = np.float32([[np.inf], [1.0]] * 101)
    model.fit(rows, rows * 0, batch_size=1, shuffle=False, verbose=0, callbacks=[ReportCallback(str(tmp_path))])
    assert int(optimizer.skipped_steps) == int(optimizer.iterations) == 101
    assert warnings_in(caplog) == warnings_in(caplog, IN_VAIN) == []


def test_of_steps_in_which_the_scale_moved_the_last_one_counts():
    skips = SkipsInARow(8.0)
    counts = []
    for scale, steps in ((8.0, 3), (4.0, 5), (4.0, 2)):
        skips.count_steps(True, scale, steps=steps)
        counts.append(skips.count)
    assert counts == [3, 1, 3]
