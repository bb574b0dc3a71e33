"""A training that only skips steps ends with the operator that makes its NaN; one whose scale settles continues."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.amp import DynamicLossScaleManager
from npu_bridge.estimator.npu.npu_config import NPURunConfig
from npu_bridge.estimator.npu.npu_estimator import NPUEstimator
from npu_bridge.estimator.npu.npu_loss_scale_manager import ExponentialUpdateLossScaleManager, FixedLossScaleManager
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
from npu_bridge.reporting import LossScaleCollapseError, LossScaleCollapseHook
from npu_bridge.stages import Accumulate

tf1 = tf.compat.v1


def train(loss_of, manager, hook, runs, feeds=None, stages=()):
    """Trains one weight for some session runs; gives the global step after them."""
    with tf.Graph().as_default():
        weight = tf1.get_variable("weight", [2], initializer=tf1.zeros_initializer())
        fed = tf1.placeholder_with_default([1.0, 1.0], [2], name="fed")
        inner = tf1.train.GradientDescentOptimizer(0.1)
        optimizer = NPUOptimizer(inner, manager(), is_loss_scale=True, stages=stages)
        step = tf1.train.get_or_create_global_step()
        train_op = optimizer.minimize(loss_of(weight, fed), step)
        with tf1.train.MonitoredSession(hooks=[hook]) as session:
            for _ in range(runs):
                session.run(train_op, None if feeds is None else {fed: feeds})
            return session.run_step_fn(lambda step_context: step_context.session.run(step))  # no run for the hook


def falling_from(scale, after=1):
    return lambda: ExponentialUpdateLossScaleManager(scale, 1000, after, 2, 0.5)


def root_of_zero(weight, fed):
    """Returns a finite number whose gradient is not finite."""
    return tf.reduce_sum(tf.sqrt(weight * fed, name="root"))


def logarithm(weight, fed):
    return tf.reduce_sum(tf.math.log(fed, name="logarithm") * (weight + 1.0))


@pytest.mark.parametrize(
    ("manager", "runs"),
    [
        (falling_from(4.0), 7),
        (lambda: FixedLossScaleManager(16), 5),
        (lambda: DynamicLossScaleManager.constant(16), 5),
        (lambda: DynamicLossScaleManager.apex(init_scale=32, min_loss_scale=16), 6),
        (falling_from(16.0, after=2**31), 5),
    ],
)
def test_it_raises_once_no_scale_is_left_to_try(manager, runs):
    """Two runs at scales above 1, then five skipped ones; scales that cannot fall have nothing to try."""
    train(root_of_zero, manager, LossScaleCollapseHook(5), runs - 1)
    with pytest.raises(LossScaleCollapseError, match="5 steps in a row.*after step 0"):
        train(root_of_zero, manager, LossScaleCollapseHook(5), runs)


def test_of_accumulated_batches_it_counts_those_that_decide_about_an_update():
    train(root_of_zero, falling_from(1.0), LossScaleCollapseHook(3), 11, stages=[Accumulate(4)])
    with pytest.raises(LossScaleCollapseError, match="3 steps in a row.*after step 0.*root_grad"):
        train(root_of_zero, falling_from(1.0), LossScaleCollapseHook(3), 12, stages=[Accumulate(4)])


def test_it_says_that_the_gradients_are_bad_and_where():
    with pytest.raises(LossScaleCollapseError) as caught:
        train(root_of_zero, falling_from(1.0), LossScaleCollapseHook(3), 3)
    text = str(caught.value)
    assert "The loss is finite, but its gradients are not" in text
    assert re.search(r"comes from \w+ '\S*root_grad\S*', made at \S*test_collapse_hook\.py:\d+", text), text


def test_it_says_that_the_loss_is_bad_with_what_the_run_was_fed():
    with pytest.raises(LossScaleCollapseError) as caught:
        train(logarithm, falling_from(1.0), LossScaleCollapseHook(3), 3, feeds=np.array([0.0, 1.0]))
    text = str(caught.value)
    assert "The loss itself is -inf" in text and "comes from Log 'logarithm'" in text


@pytest.mark.parametrize("skips_per_move", [1, 5])
def test_a_scale_on_its_way_down_may_skip_as_long_as_it_likes(skips_per_move):
    def too_steep(weight, fed):
        del fed
        return tf.reduce_sum(weight) * 2.0**30

    assert train(too_steep, falling_from(2.0**120, skips_per_move), LossScaleCollapseHook(3), 140) > 0


NAN_AT = 3


def train_to(max_steps, folder, loss_of, manager=None, hooks=(), stages=(), **options):
    """Trains an estimator on numbers of which one batch may be NaN; gives the global step it comes to."""

    def model_fn(features, mode):
        weight = tf1.get_variable("weight", [], initializer=tf1.ones_initializer())
        optimizer = tf1.train.GradientDescentOptimizer(0.1)
        if manager is not None:
            optimizer = NPUOptimizer(optimizer, manager(), is_loss_scale=True, stages=stages)
        loss = loss_of(weight, features)
        return tf.estimator.EstimatorSpec(
            mode, loss=loss, train_op=optimizer.minimize(loss, tf1.train.get_global_step())
        )

    def input_fn():
        batches = np.ones(12, np.float32)
        batches[NAN_AT] = np.nan
        return tf.data.Dataset.from_tensor_slices(batches).repeat()

    config = NPURunConfig(log_step_count_steps=None, save_checkpoints_steps=100, **options)
    estimator = NPUEstimator(model_fn, str(folder), config)
    estimator.train(input_fn, hooks=list(hooks), max_steps=max_steps)
    return estimator.get_variable_value("global_step"), estimator.get_variable_value("weight")


def times_batch(weight, batch):
    return weight * batch


def plus_batch(weight, batch):
    """NaN, with a gradient that is not."""
    return weight + batch


@pytest.mark.parametrize(("loop", "reached"), [(1, 8), (NAN_AT + 1, 11)], ids=["each step", "the last of a loop"])
def test_the_skip_decides_about_a_nan_loss(tmp_path, loop, reached):
    """Of the loops, the first counts three steps and skips one, so there are three of them."""
    step, weight = train_to(8, tmp_path, times_batch, falling_from(4.0), iterations_per_loop=loop)
    assert (step, np.isfinite(weight)) == (reached, True)


def test_a_nan_loss_of_a_step_that_is_not_skipped_ends_the_training(tmp_path):
    for name, manager in (("scaled", falling_from(4.0)), ("unscaled", None)):
        with pytest.raises(tf.estimator.NanLossDuringTrainingError, match=r"NaN in step \d+. Lower the learning rate"):
            train_to(8, tmp_path / name, plus_batch, manager)
    with pytest.raises(tf.estimator.NanLossDuringTrainingError):
        train_to(8, tmp_path / "stock", times_batch)


def test_a_nan_loss_of_an_accumulated_batch_waits_for_the_decision_about_the_update(tmp_path):
    step, weight = train_to(8, tmp_path / "skipped", times_batch, falling_from(4.0), stages=[Accumulate(3)])
    assert (step, np.isfinite(weight)) == (8, True)
    with pytest.raises(tf.estimator.NanLossDuringTrainingError, match="NaN in step 2"):
        train_to(8, tmp_path / "applied", plus_batch, falling_from(4.0), stages=[Accumulate(3)])


@pytest.mark.parametrize("hooks, most", [([], 100), ([LossScaleCollapseHook(150)], 150)], ids=["its own", "another"])
def test_a_nan_loss_that_stays_ends_at_the_lowest_scale_by_the_hook_of_an_estimator(tmp_path, hooks, most):
    with pytest.raises(LossScaleCollapseError, match=f"{most} steps in a row.*The loss itself is nan"):
        train_to(8, tmp_path, lambda weight, batch: weight * batch + tf.sqrt(-weight), falling_from(16.0), hooks)


def power(weight, batch):
    return tf.reduce_mean(tf.square(tf.square(tf.fill([2], 1000.0) * weight * batch, name="power")))


def masked(weight, batch):
    return tf.reduce_mean(tf.square(tf.add(weight * batch, [-1e9, 0.0], name="masked")))


@pytest.mark.parametrize(
    "imitates, loss_of, place",
    [
        ("1", power, r"Square 'power', made at \S*test_collapse_hook\.py:\d+\. No loss"),
        ("0", power, r"Square 'power', made at \S*test_collapse_hook\.py:\d+\. No loss"),
        ("1", masked, r"AddV2 'masked', of values rounded to 16 bits, made at \S*test_coll"),
    ],
    ids=["imitated", "kernels", "a constant beyond 16 bits"],
)
def test_what_overflows_in_16_bits_is_named(imitates, loss_of, place, tmp_path, monkeypatch):
    monkeypatch.setenv("TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_EMULATE_FP16", imitates)
    with pytest.raises(LossScaleCollapseError, match=f"comes from {place}"):
        train_to(8, tmp_path, loss_of, lambda: FixedLossScaleManager(1), precision_mode_v2="fp16")
