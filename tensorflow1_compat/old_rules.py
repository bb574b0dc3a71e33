"""Restores operators of TensorFlow 1.15: static shapes that 2.15 does not infer, and numbers instead of NaN."""

from __future__ import annotations

import functools

import tensorflow.compat.v1 as tf

from npu_bridge.base.tf_internals.contrib import constant_shape
from npu_bridge.base.tf_internals.graphs import operator_definition


@functools.wraps(tf.nn.conv2d_transpose)
def conv2d_transpose(value=None, filter=None, output_shape=None, *arguments, **options):
    """Works as `tf.nn.conv2d_transpose`; the result has the whole requested shape, also the batch."""
    result = tf.nn.conv2d_transpose(value, filter, output_shape, *arguments, **options)
    if output_shape is not None:
        shape = tf.convert_to_tensor(output_shape)
        result.set_shape(constant_shape(tf.cast(shape, tf.int32)))
    return result


def maximum(x, y, name=None):
    """Works as `tf.maximum`, but returns `x` where `y` is NaN and `x` a number: `tf.maximum(1e-10, y)` avoided NaN."""
    return _constant_instead_of_nan(tf.maximum(x, y, name), x, y)


def minimum(x, y, name=None):
    """Works as `tf.minimum`, but returns `x` where `y` is NaN and `x` a number."""
    return _constant_instead_of_nan(tf.minimum(x, y, name), x, y)


def _constant_instead_of_nan(result, x, y):
    if not result.dtype.is_floating or tf.is_tensor(x) or isinstance(x, tf.Variable):
        return result

    @tf.custom_gradient
    def chosen(result, x, y):
        # As in TensorFlow 1.15, the gradient there is that of the comparison.
        return tf.where_v2(tf.is_nan(y), x, result), lambda gradient: (gradient, None, None)

    return chosen(result, tf.convert_to_tensor(x, result.dtype), tf.convert_to_tensor(y, result.dtype))


def get_registered_ops():
    """Returns the definitions of all operators by name, for `tensorflow.python.framework.op_def_registry`."""
    return {name: operator_definition(name) for name in dir(tf.raw_ops) if not name.startswith("_")}
