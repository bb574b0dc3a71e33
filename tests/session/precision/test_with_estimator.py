"""Estimators and MonitoredTrainingSession: training is accelerated, evaluation and prediction never are."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.base import environment
from npu_bridge.estimator.npu.npu_config import ExperimentalConfig, NPURunConfig
from npu_bridge.estimator.npu.npu_estimator import NPUEstimator
from npu_bridge.estimator.npu.npu_hook import TellMeStepOrLossHook
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
from npu_bridge.options import with_optimizer_entry
from npu_bridge.stages import Accumulate
from tests.goldens.two_layers import assert_same_bits
from tests.session.precision.small_models import Dense, dtypes_of, tf1


def model_fn(features, labels, mode, params):
    kernel = tf1.get_variable("kernel", [8, 4], initializer=tf1.random_normal_initializer(stddev=0.5, seed=1))
    logits = tf.matmul(features["x"], kernel)
    if mode == tf.estimator.ModeKeys.PREDICT:
        return tf.estimator.EstimatorSpec(mode, predictions={"logits": logits})
    loss = tf.identity(tf.reduce_mean(tf.square(logits - labels)), name="loss")
    optimizer = tf1.train.MomentumOptimizer(0.05, 0.9)
    if params:
        optimizer = NPUOptimizer(optimizer, stages=params["stages"])
    train_op = optimizer.minimize(loss, tf1.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def input_fn():
    random = np.random.RandomState(0)
    data = ({"x": random.randn(64, 8).astype("f")}, random.randn(64, 4).astype("f"))
    return tf.data.Dataset.from_tensor_slices(data).repeat(100).batch(8)


def eval_input_fn():
    return input_fn().take(2)


class Kernels(tf.estimator.SessionRunHook):
    """Writes down the dtypes of matrix kernels in every run, by global step before it."""

    def __init__(self):
        self.seen = []

    def before_run(self, run_context):
        return tf.estimator.SessionRunArgs([], options=tf1.RunOptions(output_partition_graphs=True))

    def after_run(self, run_context, run_values):
        nodes = [node for graph in run_values.run_metadata.partition_graphs for node in graph.node]
        self.seen.append("/".join(dtypes_of(nodes)))


def npu_estimator(folder, plan="fast|step|0.5", params=None, **options):
    config = NPURunConfig(
        model_dir=str(folder),
        save_checkpoints_steps=100,
        experimental_config=ExperimentalConfig(accelerate_train_mode=plan),
        **options,
    )
    return NPUEstimator(model_fn, config=config, params=params)


def test_step_way(tmp_path, caplog):
    kernels = Kernels()
    estimator = npu_estimator(tmp_path)
    with caplog.at_level(logging.INFO, "npu_bridge"):
        hook = TellMeStepOrLossHook(step="global_step:0", total_step=8)
        estimator.train(input_fn, hooks=[hook, kernels], max_steps=8)
    assert kernels.seen == ["float16"] * 4 + ["float32"] * 4
    assert "steps 0-3 in float16, 4-7 in float32" in caplog.text
    assert "float32 from here on (step 4)" in caplog.text
    assert not [record for record in caplog.records if record.levelno > logging.INFO and "precision" in record.name]


def test_loss_way(tmp_path):
    kernels, losses = Kernels(), []

    class Losses(tf.estimator.SessionRunHook):
        def after_run(self, run_context, run_values):
            losses.append(float(environment.read_variable("LOSS_NOW")))

    target = 1.2
    hook = TellMeStepOrLossHook(loss="loss:0", final_loss=target)
    npu_estimator(tmp_path, "fast|loss|1.25").train(input_fn, hooks=[hook, kernels, Losses()], max_steps=40)
    reached = next(step for step, loss in enumerate(losses) if loss <= target * 1.25)
    assert 0 < reached < 38
    assert kernels.seen == ["float16"] * (reached + 1) + ["float32"] * (39 - reached)


def test_without_a_hook_the_global_step_counts(tmp_path):
    for arguments in ({"max_steps": 6}, {"steps": 6}):
        kernels = Kernels()
        npu_estimator(tmp_path / next(iter(arguments))).train(input_fn, hooks=[kernels], **arguments)
        assert kernels.seen == ["float16"] * 3 + ["float32"] * 3


@pytest.mark.parametrize(
    "max_steps, expected",
    [
        (12, ["float16"] * 2 + ["float32"]),  # from step 8 on: past 6, and the last loop
        (4, ["float16"]),  # the first run is never judged
    ],
)
def test_a_training_in_loops_switches_between_two(tmp_path, max_steps, expected):
    kernels = Kernels()
    estimator = npu_estimator(tmp_path, iterations_per_loop=4)
    estimator.train(input_fn, hooks=[kernels], max_steps=max_steps)
    assert kernels.seen == expected
    assert estimator.get_variable_value("global_step") == max_steps


def test_loops_of_accumulated_batches_switch_after_updates(tmp_path, caplog):
    kernels = Kernels()
    estimator = npu_estimator(tmp_path, params={"stages": [Accumulate(2)]}, iterations_per_loop=4)
    estimator.train(input_fn, hooks=[kernels], max_steps=6)
    assert kernels.seen == ["float16"] * 2 + ["float32"]  # from step 4 on: past 3, and the last loop
    assert "the last loop" not in caplog.text
    estimator.train(input_fn, steps=3)
    assert "got 3 further steps of 2 batches. Train 4" in caplog.text


def test_all_steps_of_a_loop_are_in_its_precision(tmp_path):
    """Half of eight steps in low precision, as two loops and one by one: the same bits."""
    trained = []
    for loop in (1, 4):
        estimator = npu_estimator(tmp_path / str(loop), iterations_per_loop=loop)
        estimator.train(input_fn, max_steps=8)
        trained.append({name: estimator.get_variable_value(name) for name in estimator.get_variable_names()})
    stock = tf.estimator.Estimator(model_fn, str(tmp_path / "stock"))
    stock.train(input_fn, max_steps=8)
    assert_same_bits(trained[1], trained[0])
    assert trained[1]["kernel"].tobytes() != stock.get_variable_value("kernel").tobytes()


def test_an_evaluation_in_the_middle_does_not_lose_count(tmp_path):
    """As train_and_evaluate does it, from within the training."""
    estimator, kernels = npu_estimator(tmp_path), Kernels()

    class EvaluateOnce(tf.estimator.SessionRunHook):
        def __init__(self):
            self.runs = 0

        def after_run(self, run_context, run_values):
            self.runs += 1
            if self.runs == 2:
                estimator.evaluate(eval_input_fn)

    estimator.train(input_fn, hooks=[kernels, EvaluateOnce()], max_steps=10)
    assert kernels.seen == ["float16"] * 5 + ["float32"] * 5


def test_evaluation_and_prediction_are_never_accelerated(tmp_path):
    estimator = npu_estimator(tmp_path)
    estimator.train(input_fn, hooks=[TellMeStepOrLossHook(step="global_step:0", total_step=100)], max_steps=3)
    kernels = Kernels()
    result = estimator.evaluate(eval_input_fn, hooks=[kernels])
    predictions = [row["logits"] for row in estimator.predict(eval_input_fn, hooks=[kernels])]
    assert set(kernels.seen) == {"float32"}

    stock = tf.estimator.Estimator(model_fn, str(tmp_path))
    assert stock.evaluate(eval_input_fn)["loss"] == result["loss"]
    np.testing.assert_array_equal([row["logits"] for row in stock.predict(eval_input_fn)], predictions)


def test_configured_precision_holds_for_evaluation(tmp_path):
    config = NPURunConfig(model_dir=str(tmp_path), save_checkpoints_steps=100, precision_mode_v2="mixed_float16")
    estimator, kernels = NPUEstimator(model_fn, config=config), Kernels()
    estimator.train(input_fn, hooks=[kernels], max_steps=2)
    estimator.evaluate(eval_input_fn, hooks=[kernels])
    assert set(kernels.seen) == {"float16"}


def test_training_goes_on_after_the_switch_and_resumes_before_it(tmp_path):
    estimator = npu_estimator(tmp_path)
    for max_steps, expected in ((2, ["float16"] * 2), (6, ["float16"] * 2 + ["float32"] * 2), (8, ["float32"] * 2)):
        kernels = Kernels()
        hook = TellMeStepOrLossHook(step="global_step:0", total_step=8)
        estimator.train(input_fn, hooks=[hook, kernels], max_steps=max_steps)
        assert kernels.seen == expected
    kernels = Kernels()  # a new process: its first run is in low precision
    hook = TellMeStepOrLossHook(step="global_step:0", total_step=8)
    npu_estimator(tmp_path).train(input_fn, hooks=[hook, kernels], max_steps=10)
    assert kernels.seen == ["float16", "float32"]


def test_sessions_that_say_it_in_their_settings(tmp_path):
    config = with_optimizer_entry(None, {"experimental_accelerate_train_mode": "fast|step|0.5"})
    for folder, sessions in (("one", [6]), ("two", [4, 2])):  # each training switches once
        kernels = Kernels()
        for steps in sessions:
            model = Dense()
            with model.graph.as_default():
                hook = TellMeStepOrLossHook(step=model.global_step, total_step=6)
                arguments = {"checkpoint_dir": str(tmp_path / folder), "hooks": [hook, kernels], "config": config}
                with tf1.train.MonitoredTrainingSession(**arguments) as session:
                    for _ in range(steps):
                        session.run([model.train_op, model.loss], model.batch(0))
        assert kernels.seen == ["float16"] * 3 + ["float32"] * 3


def test_a_session_that_takes_over_after_a_failure_stays_after_the_switch(tmp_path):
    kernels = Kernels()

    class FailOnce(tf.estimator.SessionRunHook):
        runs = 0

        def after_run(self, run_context, run_values):
            self.runs += 1
            if self.runs == 6:
                raise tf.errors.AbortedError(None, None, "lost")

    hook = TellMeStepOrLossHook(step="global_step:0", total_step=8)
    npu_estimator(tmp_path).train(input_fn, hooks=[hook, kernels, FailOnce()], max_steps=8)
    assert kernels.seen[:6] == ["float16"] * 4 + ["float32"] * 2
    assert set(kernels.seen[6:]) == {"float32"}
