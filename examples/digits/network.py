"""Builds the network that reads a digit, and its loss scaling: the same for every script in this folder."""

from __future__ import annotations

from npu_bridge.npu_init import ExponentialUpdateLossScaleManager, tf


def logits_of(pictures: tf.Tensor) -> tf.Tensor:
    """Builds a small convolutional network: pictures [n, 8, 8, 1] in, logits [n, 10] out, both float32."""
    edges = tf.nn.relu(_layer(pictures, [3, 3, 1, 16], "edges"))
    strokes = tf.nn.relu(_layer(edges, [3, 3, 16, 32], "strokes"))
    shapes = tf.nn.relu(_layer(tf.reshape(strokes, [-1, 2 * 2 * 32]), [2 * 2 * 32, 64], "shapes"))
    return _layer(shapes, [64, 10], "digits")


def new_loss_scale() -> ExponentialUpdateLossScaleManager:
    """Makes a loss scale that is halved after an overflow, and doubled after a thousand steps without overflow."""
    return ExponentialUpdateLossScaleManager(
        init_loss_scale=2**15, incr_every_n_steps=1000, decr_every_n_nan_or_inf=1, decr_ratio=0.5
    )


def _layer(inputs, shape, name):
    """Builds a product with a kernel of this shape, or a convolution that halves height and width; and a bias."""
    with tf.variable_scope(name):
        kernel = tf.get_variable("kernel", shape, initializer=tf.glorot_uniform_initializer())
        bias = tf.get_variable("bias", shape[-1:], initializer=tf.zeros_initializer())
        if len(shape) == 2:
            return tf.matmul(inputs, kernel) + bias
        return tf.nn.conv2d(inputs, kernel, strides=2, padding="SAME") + bias
