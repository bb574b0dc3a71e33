"""Makes an Estimator whose steps add 1 to a weight, for tests of starts, checkpoints and locks."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from npu_bridge.estimator.npu.npu_config import NPURunConfig
from npu_bridge.estimator.npu.npu_estimator import NPUEstimator, NPUEstimatorSpec
from npu_bridge.estimator.npu.npu_optimizer import NPUDistributedOptimizer

tf1 = tf.compat.v1


def input_fn():
    return tf.data.Dataset.from_tensors({"x": np.float32([1.0])}).repeat()


def model_fn(features, mode, params):
    """The weight starts from `params["start"]`; the table only fills checkpoints."""
    weight = tf1.get_variable("weight", [], initializer=tf1.constant_initializer(params.get("start", 0.0)))
    tf1.get_variable("table", [100, 50], initializer=tf1.random_uniform_initializer())
    sums = features["x"] + weight
    if mode == tf.estimator.ModeKeys.PREDICT:
        return NPUEstimatorSpec(mode, predictions={"sum": sums})
    loss = -tf.reduce_sum(sums)
    optimizer = tf1.train.GradientDescentOptimizer(1.0)
    if params.get("is_distributed"):
        optimizer = NPUDistributedOptimizer(optimizer)
    with tf.control_dependencies([loss]):  # its gradient is a constant, which waits for nothing
        train_op = optimizer.minimize(loss, tf1.train.get_global_step())
    return NPUEstimatorSpec(mode, loss=loss, train_op=train_op, **params.get("of_spec", {}))


def estimator_of(folder, params=None, job_start_file="", warm_start_from=None, **options):
    """Makes an estimator that saves every second step."""
    options = {"log_step_count_steps": None, "save_checkpoints_steps": 2, **options}
    config = NPURunConfig(model_dir=str(folder), **options)
    return NPUEstimator(
        model_fn, config=config, params=params, job_start_file=job_start_file, warm_start_from=warm_start_from
    )
