"""Numbers of Keras optimizers."""

from __future__ import annotations

import tensorflow as tf

from npu_bridge.reporting.keras_numbers import OptimizerNumbers


def test_a_tf_train_optimizer_inside_keras_has_no_rate_to_read():
    with tf.Graph().as_default():
        numbers = OptimizerNumbers.of(tf.keras.optimizers.get(tf.compat.v1.train.AdamOptimizer(0.5)))
        assert numbers == OptimizerNumbers(step=0, loss_scale=None, skipped_steps=None, learning_rate=None)
