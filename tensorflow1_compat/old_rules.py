"""Restores behaviour of operators in TensorFlow 1.15: static shapes that 2.15 does not infer, and NaN handling."""

from __future__ import annotations

import functools

import tensorflow.compat.v1 as tf

from npu_bridge.base.tf_internals.contrib import constant_shape
from npu_bridge.base.tf_internals.graphs import operator_definition


@functools.wraps(tf.nn.conv2d_transpose)
def conv2d_transpose(value=None, filter=None, output_shape=None, *arguments, **options):
    """Calls `tf.nn.conv2d_transpose`; the static shape of the result is `output_shape`, including the batch."""
    result = tf.nn.conv2d_transpose(value, filter, output_shape, *arguments, **options)
    if output_shape is not None:
        shape = tf.convert_to_tensor(output_shape)
        result.set_shape(constant_shape(tf.cast(shape, tf.int32)))
    return result


def maximum(x, y, name=None):
    """Calls `tf.maximum`; a constant `x` replaces NaN in `y`, because `tf.maximum(1e-10, y)` removed NaN in 1.15."""
    return _replace_nan_by_constant(tf.maximum(x, y, name), x, y)


def minimum(x, y, name=None):
    """Calls `tf.minimum`; a constant `x` replaces NaN in `y`, as in 1.15."""
    return _replace_nan_by_constant(tf.minimum(x, y, name), x, y)


def _replace_nan_by_constant(result, x, y):
    if not result.dtype.is_floating or tf.is_tensor(x) or isinstance(x, tf.Variable):
        return result

    @tf.custom_gradient
    def select_constant(result, x, y):
        # As in TensorFlow 1.15, NaN elements have the gradient of the comparison.
        return tf.where_v2(tf.is_nan(y), x, result), lambda gradient: (gradient, None, None)

    return select_constant(result, tf.convert_to_tensor(x, result.dtype), tf.convert_to_tensor(y, result.dtype))


def get_registered_ops():
    """Returns the definitions of all operators by name, for `tensorflow.python.framework.op_def_registry`."""
    return {name: operator_definition(name) for name in dir(tf.raw_ops) if not name.startswith("_")}
