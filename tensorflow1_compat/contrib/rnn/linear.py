"""Defines the affine map that RNN cells of TensorFlow 1 contain."""

from __future__ import annotations

import tensorflow.compat.v1 as tf


class _Linear:
    """An affine map `concat(args) @ kernel + bias` with the variables `kernel` and `bias` in the current scope.

    Args:
      args: a 2-D tensor or a list of 2-D tensors, with the same shapes as in later calls.
      output_size: width of the result.
      build_bias: adds a bias.
      bias_initializer: initializer of the bias; default: zeros.
      kernel_initializer: initializer of the kernel; default: the initializer of the variable scope.
    """

    def __init__(self, args, output_size, build_bias, bias_initializer=None, kernel_initializer=None):
        args = self._as_list(args)
        width = sum(tf.compat.dimension_value(arg.shape[1]) for arg in args)
        self._build_bias = build_bias
        scope = tf.get_variable_scope()
        with tf.variable_scope(scope) as outer:
            self._weights = tf.get_variable(
                "kernel", [width, output_size], dtype=args[0].dtype, initializer=kernel_initializer
            )
            if build_bias:
                with tf.variable_scope(outer) as inner:
                    inner.set_partitioner(None)
                    self._biases = tf.get_variable(
                        "bias", [output_size], dtype=args[0].dtype,
                        initializer=bias_initializer or tf.zeros_initializer(args[0].dtype),
                    )  # fmt: skip

    @staticmethod
    def _as_list(args):
        if args is None or (tf.nest.is_nested(args) and not args):
            raise ValueError("_Linear: args must be a tensor or a list of tensors.")
        return list(args) if tf.nest.is_nested(args) else [args]

    def __call__(self, args):
        args = self._as_list(args)
        result = tf.matmul(args[0] if len(args) == 1 else tf.concat(args, 1), self._weights)
        return tf.nn.bias_add(result, self._biases) if self._build_bias else result


def _linear(args, output_size, bias, bias_initializer=None, kernel_initializer=None):
    """Makes a `_Linear` for `args`, and returns its result for `args`."""
    return _Linear(args, output_size, bias, bias_initializer, kernel_initializer)(args)
