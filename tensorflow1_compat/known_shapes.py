"""Operators whose results had static shapes in TensorFlow 1.15 that TensorFlow 2.15 no longer tells."""

from __future__ import annotations

import functools

import tensorflow.compat.v1 as tf

from npu_bridge.base.tf_internals.contrib import constant_shape


@functools.wraps(tf.nn.conv2d_transpose)
def conv2d_transpose(value=None, filter=None, output_shape=None, *arguments, **options):
    """`tf.nn.conv2d_transpose`, whose result has the whole shape that was asked for, the batch too."""
    result = tf.nn.conv2d_transpose(value, filter, output_shape, *arguments, **options)
    if output_shape is not None:
        shape = tf.convert_to_tensor(output_shape)
        result.set_shape(constant_shape(tf.cast(shape, tf.int32)))
    return result
