"""A configuration reads the same on every rank, and rank 0 alone writes."""

from __future__ import annotations

import os

import pytest
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.npu_init import NPUEstimator, NPURunConfig

pytestmark = pytest.mark.ranks(2)
tf1 = tf.compat.v1
NAMES = ("save_checkpoints_steps", "save_checkpoints_secs", "save_summary_steps", "log_step_count_steps")


def numbers(config):
    return [getattr(config, name) for name in NAMES]


def train_and_read(folder, kind, has_listeners):
    """On a rank: what the configuration says before, in the model function, in a hook, and afterwards."""
    rank, seen, told = collective.current().rank, [], []

    def model_fn(features, labels, mode, config):
        seen.append(numbers(config))
        step, weight = tf1.train.get_or_create_global_step(), tf1.get_variable("weight", [])
        loss = tf.square(weight - tf.reduce_mean(features))
        hook = tf1.train.StepCounterHook(every_n_steps=config.save_checkpoints_steps, output_dir=folder + "/counted")
        update = tf1.train.GradientDescentOptimizer(0.1).minimize(loss, step)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=update, training_hooks=[hook])

    class Reading(tf.estimator.SessionRunHook):
        def begin(self):
            seen.append(numbers(estimator.config))

    class Listening(tf1.train.CheckpointSaverListener):
        def after_save(self, session, step):
            told.append(int(step))

    config = NPURunConfig(
        model_dir=os.path.join(folder, str(rank)),
        save_checkpoints_steps=2,
        save_summary_steps=2,
        log_step_count_steps=2,
    )
    kinds = {"npu": NPUEstimator, "plain": tf.estimator.Estimator, "of version 1": tf1.estimator.Estimator}
    estimator = kinds[kind](model_fn, config=config)
    seen += [numbers(config), numbers(estimator.config)]
    listeners = [Listening()] if has_listeners else None
    data = lambda: tf.data.Dataset.from_tensors([1.0]).repeat()  # noqa: E731
    estimator.train(data, hooks=[Reading()], steps=4, saving_listeners=listeners)
    seen.append(numbers(estimator.config))
    names = os.listdir(config.model_dir) if os.path.isdir(config.model_dir) else []
    wrote = any("ckpt" in name or "tfevents" in name for name in names)
    return seen, told, wrote


@pytest.mark.few_fast("each", "not every pair")
@pytest.mark.parametrize("has_listeners", [False, True])
@pytest.mark.parametrize("kind", ["npu", "plain", "of version 1"])
def test_numbers_are_the_scripts_on_every_rank(on_ranks, tmp_path, kind, has_listeners):
    results = on_ranks(2, train_and_read, str(tmp_path), kind, has_listeners)
    for seen, _, _ in results:
        assert seen == [[2, None, 2, 2]] * 5
    assert [wrote for _, _, wrote in results] == [True, False]
    assert results[0][1] == ([0, 2, 4] if has_listeners else []) and results[1][1] == []
