"""Centralises gradients: subtracts the mean from the gradient of each layer output."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from npu_bridge.base.arguments import check_texts
from npu_bridge.base.errors import say_once
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.tf_internals import keras3
from npu_bridge.gradients.arithmetic import widen
from npu_bridge.gradients.stage import Stage


@tf.keras.utils.register_keras_serializable(package="npu_bridge")
class CentralizeGradients(Stage):
    """Subtracts from the gradients of matrices and kernels their mean over all axes but the last one.

    The last axis is the axis of a layer's outputs. It is not in transposed convolutions, in query, key and value of
    `MultiHeadAttention`, and in depthwise convolutions of Keras 3, so name these in `skip`. Three kinds of gradients
    stay unchanged: those with one value for each output, such as vectors and scalars; those of variables whose name
    contains a string of `skip`; and sparse gradients, which is logged once.

    Args:
      skip: list of strings. A variable whose name contains one of them is left unchanged.
    Raises:
      TypeError: `skip` is not a list of strings.
    """

    place = "centralise"
    keeps_usable = True
    needs_variables = True

    def __init__(self, skip: Sequence[str] = ("beta", "gamma", "bias", "depthwise")):
        self._skip = tuple(check_texts("CentralizeGradients", "skip", skip, "Write skip=[...]."))

    def get_config(self):
        return {"skip": list(self._skip)}

    def after_reduce(self, step):
        with tf.name_scope("CentralizeGradients"):
            step.grads_and_vars = [
                (self._centralise(grad, variable), variable) for grad, variable in step.grads_and_vars
            ]

    def _centralise(self, grad: Any, variable: Any) -> Any:
        if grad is None or any(word in keras3.name_of(variable) for word in self._skip):
            return grad
        if isinstance(grad, tf.IndexedSlices):
            # Subtracting the mean over rows would change every row of the table.
            name = keras3.name_of(variable)
            say_once(logging.INFO, f"CentralizeGradients: the sparse gradient of {name} stays unchanged.")
            return grad
        # Python code gives gradients of unknown shape.
        shape = tf.TensorShape(variable.shape) if grad.shape.rank is None else grad.shape
        if shape.rank is None or all(size == 1 for size in shape[:-1]):  # the difference would be 0
            return grad
        wide = widen(grad)
        mean = tf.reduce_mean(wide, axis=list(range(shape.rank - 1)), keepdims=True)
        # The difference of two large float16 numbers can be too large for float16.
        return wide - mean if wide is grad else tf.saturate_cast(wide - mean, grad.dtype)
