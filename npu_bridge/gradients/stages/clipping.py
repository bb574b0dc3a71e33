"""Bounds single values of gradients, or the norm of all of them."""

from __future__ import annotations

from typing import Any

from npu_bridge.base.arguments import check_number
from npu_bridge.base.errors import message
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.gradients.arithmetic import half_squared_sums, map_values, sum_in_order, sum_repeated_rows
from npu_bridge.gradients.stage import Stage


@tf.keras.utils.register_keras_serializable(package="npu_bridge")
class ClipByGlobalNorm(Stage):
    """Shrinks all gradients by one factor when their global norm is above a bound.

    The norm is that of the reduced gradients in true units, over all variables, in float32. A step whose norm is not
    finite is skipped.

    Args:
      clip_norm: the largest norm, above 0.
    Raises:
      TypeError: `clip_norm` is not a number.
      ValueError: it is not positive and finite.
    """

    place = "clip by norm"
    needs = ("a verdict",)
    keeps_usable = True

    def __init__(self, clip_norm: float):
        self._clip_norm = check_number("ClipByGlobalNorm", "clip_norm", clip_norm, "Use 1.0.", above=0)

    def get_config(self):
        return {"clip_norm": self._clip_norm}

    def after_reduce(self, step):
        with tf.name_scope("ClipByGlobalNorm"):
            step.map(_with_rows_once)  # only then is the norm that of the dense gradient
            if not step.gradients:
                return
            halves = [tf.cast(half, tf.float32) for half in half_squared_sums(step.gradients)]
            norm = tf.sqrt(2.0 * sum_in_order(halves))
            factor = self._clip_norm / tf.maximum(norm, self._clip_norm)
            step.map_elements(lambda values: _multiplied(values, factor))


@tf.keras.utils.register_keras_serializable(package="npu_bridge")
class ClipByValue(Stage):
    """Bounds every value of the reduced gradients, in true units. An Inf or NaN is kept, and skips the step.

    Args:
      low: the smallest value; with one argument, the bound on both sides.
      high: the largest value, above `low`.
    Raises:
      TypeError: an argument is not a number.
      ValueError: it is not finite, or `high` is not above `low`.
    """

    place = "clip by value"
    needs = ("a verdict",)
    keeps_usable = True

    def __init__(self, low: float, high: float | None = None):
        owner = type(self).__name__
        if high is None:
            self._high = check_number(owner, "low", low, "Alone it is the bound on both sides; use 1.0.", above=0)
            self._low = -self._high
            return
        self._low, self._high = (check_number(owner, name, value) for name, value in (("low", low), ("high", high)))
        if self._low >= self._high:
            got, fix = f"low={low!r}, high={high!r}", "Use -1.0 and 1.0."
            raise ValueError(message(owner, "the bounds are not a range", "low < high", got, fix))

    def get_config(self):
        return {"low": self._low, "high": self._high}

    def after_reduce(self, step):
        with tf.name_scope("ClipByValue"):
            step.map(_with_rows_once)
            step.map_elements(lambda values: bounded(values, self._low, self._high))


@tf.keras.utils.register_keras_serializable(package="npu_bridge")
class ClipLocally(ClipByValue):
    """Bounds every value of this rank's gradients, in true units, before the gradients of other ranks are added.

    Args, Raises: as `ClipByValue`.
    """

    place = "local clip"

    def before_reduce(self, step):
        factor = 1.0 if step.divisor is None else step.divisor
        with tf.name_scope("ClipLocally"):
            step.map(_with_rows_once)
            step.map(lambda grad: map_values(grad, lambda values: bounded(values, self._low, self._high, factor)))

    def after_reduce(self, step):
        pass


def bounded(values: tf.Tensor, low: float, high: float, factor: Any = 1.0) -> tf.Tensor:
    """Clips finite values to the bounds times `factor`, which is positive; keeps Inf and NaN."""
    wide = tf.cast(values, tf.float32) if values.dtype.size < tf.float32.size else values
    factor = tf.cast(factor, wide.dtype)
    clipped = tf.clip_by_value(wide, low * factor, high * factor)
    return tf.cast(tf.where(tf.math.is_finite(wide), clipped, wide), values.dtype)


def _with_rows_once(grad):
    return sum_repeated_rows(grad) if isinstance(grad, tf.IndexedSlices) else grad


def _multiplied(values, factor):
    if values.dtype.size < tf.float32.size:
        return tf.cast(tf.cast(values, tf.float32) * factor, values.dtype)
    return values * tf.cast(factor, values.dtype)
