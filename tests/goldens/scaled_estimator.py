"""The model of an Estimator under a loss scale that moves, and its data, of which a batch may overflow."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from npu_bridge.estimator.npu.npu_estimator import NPUEstimatorSpec
from npu_bridge.estimator.npu.npu_loss_scale_manager import ExponentialUpdateLossScaleManager
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
from tests.goldens.two_layers import OPTIMIZERS

tf1 = tf.compat.v1


def scaled_step(loss, is_distributed=False):
    """Makes a training step by Adam."""
    manager = ExponentialUpdateLossScaleManager(1024, 3, 1, 2, 0.5)
    optimizer = NPUOptimizer(OPTIMIZERS["adam"](), manager, is_distributed, is_loss_scale=True)
    return optimizer.minimize(loss, tf1.train.get_or_create_global_step())


def model_fn(features, labels, mode, params):
    """Predictions show the first number of each row. With `noise`, the model draws a number in each step."""
    kernel = tf1.get_variable("kernel", [4, 1], initializer=tf1.random_normal_initializer(seed=params.get("seed", 1)))
    rows = features + 0.1 * tf.random.uniform([4], seed=2) if params.get("noise") else features
    predictions = tf.matmul(rows, kernel)
    if mode == tf.estimator.ModeKeys.PREDICT:
        return NPUEstimatorSpec(mode, predictions={"value": predictions, "first": features[:, 0]})
    loss = tf.reduce_mean(tf.square(predictions - labels), name="the_loss")
    tf1.summary.scalar("summarized", loss)
    train_op, metrics = scaled_step(loss, params.get("is_distributed", False)), {"batches": tf1.metrics.mean(1.0)}
    return NPUEstimatorSpec(mode, loss=loss, train_op=train_op, eval_metric_ops=metrics)


def batches_of_rows(count, overflowing=None, seed=5):
    """Batches of four rows each, and their sums; the loss of one may be infinite, but not NaN."""
    features = np.random.RandomState(seed).randn(4 * count, 4).astype("f")
    labels = np.sum(features, axis=1, keepdims=True)
    if overflowing is not None:
        features[4 * overflowing, 0] = np.inf
    return tf.data.Dataset.from_tensor_slices((features, labels)).batch(4)
