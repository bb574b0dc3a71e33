"""Clips gradients: single values, or the global norm."""

from __future__ import annotations

from typing import Any

from npu_bridge.base.arguments import check_number
from npu_bridge.base.errors import message
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.gradients.arithmetic import (
    half_squared_sums,
    multiply_values,
    sum_in_order,
    widen,
)
from npu_bridge.gradients.stage import VERDICT, Stage


@tf.keras.utils.register_keras_serializable(package="npu_bridge")
class ClipByGlobalNorm(Stage):
    """Multiplies all gradients by one factor if their global norm is above a bound, as `tf.clip_by_global_norm`.

    The norm is computed in float32 from the averaged, unscaled gradients of all variables, or in float64 if it exceeds
    float32. A step with unusable gradients is skipped.

    Args:
      clip_norm: the largest norm, above 0.
    Raises:
      TypeError: `clip_norm` is not a number.
      ValueError: `clip_norm` is not above 0, or no finite float32.
    """

    place = "clip by norm"
    needs = (VERDICT,)
    keeps_usable = True

    def __init__(self, clip_norm: float):
        self._clip_norm = check_number(
            "ClipByGlobalNorm", "clip_norm", clip_norm, "Use 1.0.", above=0, at_most=tf.float32.max
        )

    def get_config(self):
        return {"clip_norm": self._clip_norm}

    def after_reduce(self, step):
        with tf.name_scope("ClipByGlobalNorm"):
            if not step.gradients:
                return
            factor = self._clip_factor(half_squared_sums(step.gradients))
            step.map_gradient_elements(lambda values: multiply_values(values, factor))

    def _clip_factor(self, halves):
        """Returns the factor of all gradients from half the sum of squares of each dtype, a float64 scalar."""

        def factor_in(dtype):
            norm = tf.sqrt(2.0 * sum_in_order([tf.cast(half, dtype) for half in halves]))
            return norm, tf.cast(self._clip_norm / tf.maximum(norm, self._clip_norm), tf.float64)

        norm, factor = factor_in(tf.float32)  # as tf.clip_by_global_norm
        # In float32 the norm of usable gradients can be infinite: of float64 gradients, or above 1.8e19.
        return tf.where(tf.math.is_finite(norm), factor, factor_in(tf.float64)[1])


class _ClippingStage(Stage):
    """Base of stages that clip single values; arguments and errors as in `ClipByValue`."""

    needs = (VERDICT,)
    keeps_usable = True

    def __init__(self, low: float, high: float | None = None):
        owner = type(self).__name__
        if high is None:
            self._high = check_number(owner, "low", low, "Use 1.0 for values from -1 to 1.", above=0)
            self._low = -self._high
            return
        self._low, self._high = (check_number(owner, name, value) for name, value in (("low", low), ("high", high)))
        if self._low >= self._high:
            got, fix = f"low={low!r}, high={high!r}", "Use -1.0 and 1.0."
            raise ValueError(message(owner, "the bounds are not a range", "low < high", got, fix))

    def get_config(self):
        return {"low": self._low, "high": self._high}

    def _clip(self, step):
        factor = 1.0 if step.divisor is None else step.divisor
        with tf.name_scope(type(self).__name__):
            step.map_gradient_elements(lambda values: clip_finite_values(values, self._low, self._high, factor))


@tf.keras.utils.register_keras_serializable(package="npu_bridge")
class ClipByValue(_ClippingStage):
    """Clips every value of the averaged, unscaled gradients. Inf and NaN are kept, so that the step is skipped.

    Args:
      low: the smallest value. Without `high`, values are clipped to -low and low.
      high: the largest value, above `low`.
    Raises:
      TypeError: an argument is not a number.
      ValueError: an argument is not finite, or `high` is not above `low`.
    """

    place = "clip by value"

    def after_reduce(self, step):
        self._clip(step)


@tf.keras.utils.register_keras_serializable(package="npu_bridge")
class ClipLocally(_ClippingStage):
    """Clips every value of this rank's unscaled gradients, before they are averaged over the ranks.

    Args, Raises: as in `ClipByValue`.
    """

    place = "local clip"
    needs_unscaled_gradients = True

    def before_reduce(self, step):
        self._clip(step)


def clip_finite_values(values: tf.Tensor, low: float, high: float, factor: Any = 1.0) -> tf.Tensor:
    """Clips finite values to the range from low·factor to high·factor; keeps Inf and NaN. `factor` is positive."""
    wide = widen(values)
    factor = tf.cast(factor, wide.dtype)
    clipped = tf.clip_by_value(wide, low * factor, high * factor)
    return tf.cast(tf.where(tf.math.is_finite(wide), clipped, wide), values.dtype)
