"""Defines the rule by which a loss scale grows and shrinks, and checks the arguments that set the rule."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

from npu_bridge.base.arguments import check_count, check_number, check_switch
from npu_bridge.base.own_tensorflow import tf

LARGEST_SCALE = 3.4e38  # a little below the largest float32; no scale grows beyond
SMALLEST_SCALE = 1e-37  # a little above the smallest normal float32; below it a scale would be 0 or lose bits
MOST_COUNTED_STEPS = 2**31 - 1  # the counters are int32 in every existing checkpoint
check_scale = functools.partial(check_number, at_least=SMALLEST_SCALE, at_most=LARGEST_SCALE)
check_growth = functools.partial(check_number, at_least=1, at_most=LARGEST_SCALE)
_check_backoff = functools.partial(check_number, above=0, at_most=1)
# By argument of a dynamic manager or a level: the attribute of `ScaleRule` that it sets, and its check.
_RULE_ARGUMENTS: dict[str, tuple[str, Any]] = {
    **dict.fromkeys(("growth_interval", "incr_every_n_steps", "scale_window"), ("growth_interval", check_count)),
    **dict.fromkeys(("bad_steps", "decr_every_n_nan_or_inf"), ("bad_steps", check_count)),
    **dict.fromkeys(("growth_factor", "incr_ratio", "scale_growth_factor"), ("growth_factor", check_growth)),
    **dict.fromkeys(("backoff_factor", "decr_ratio", "scale_backoff_factor"), ("backoff_factor", _check_backoff)),
    "consecutive_bad_steps": ("counts_in_a_row", functools.partial(check_switch, fix="Pass the arguments by name.")),
    "min_loss_scale": ("min_scale", check_scale),
    "max_loss_scale": ("max_scale", check_scale),
}


class ScaleState(NamedTuple):
    """The state of a dynamic loss scale between steps: numbers or tensors. For several scales, arrays of one shape.

    Attributes:
      scale: the loss scale, float32.
      good_steps: number of consecutive steps with finite gradients since the last change of the scale, int32.
      bad_steps: number of steps with an overflow since the last change of the scale, int32.
    """

    scale: Any
    good_steps: Any
    bad_steps: Any


@dataclasses.dataclass(frozen=True)
class ScaleRule:
    """A rule that changes a loss scale after each step. Each change of the scale sets both counters to 0.

    Attributes:
      growth_interval: number of good steps in a row after which the scale grows.
      bad_steps: number of bad steps after which the scale shrinks.
      growth_factor, backoff_factor: factors by which the scale is multiplied to grow and to shrink.
      min_scale: lower limit of the scale; None for the smallest normal float32.
      max_scale: upper limit of the scale; None to grow as long as the result is below 3.4e38.
      counts_in_a_row: whether a good step sets the count of bad steps to 0.
    """

    growth_interval: int = 2000
    bad_steps: int = 1
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    min_scale: float | None = None
    max_scale: float | None = None
    counts_in_a_row: bool = False

    def next_state(self, state: ScaleState, finite: tf.Tensor) -> ScaleState:
        """Computes the state after a step.

        Args:
          state: tensors with the state before the step.
          finite: boolean tensor of the shape of the scale, True for finite gradients.
        """
        none = tf.zeros_like(state.good_steps)
        good_steps = _where(finite, _increment_count(state.good_steps), none)
        bad_steps = _where(finite, none if self.counts_in_a_row else state.bad_steps, _increment_count(state.bad_steps))
        grows = tf.logical_and(finite, _is_reached(good_steps, self.growth_interval))
        shrinks = tf.logical_and(tf.logical_not(finite), _is_reached(bad_steps, self.bad_steps))
        is_settled = tf.logical_or(grows, shrinks)
        moved = _where(shrinks, self._shrink(state.scale), state.scale)
        return ScaleState(
            scale=_where(grows, self._grow(state.scale), moved),
            good_steps=_where(is_settled, none, good_steps),
            bad_steps=_where(is_settled, none, bad_steps),
        )

    @property
    def bounds(self) -> tuple[float, float]:
        """The lowest and the highest scale."""
        return self.min_scale or SMALLEST_SCALE, self.max_scale or LARGEST_SCALE

    def can_lower(self, scale: float) -> bool:
        """Returns whether steps with an overflow can ever lower this scale."""
        return self.bad_steps <= MOST_COUNTED_STEPS and max(self.bounds[0], scale * self.backoff_factor) < scale

    def _grow(self, scale):
        grown = scale * self.growth_factor
        if self.max_scale is not None:
            grown = tf.minimum(grown, self.max_scale)
        return _where(scale < tf.constant(LARGEST_SCALE / self.growth_factor, tf.float32), grown, scale)

    def _shrink(self, scale):
        return tf.maximum(self.bounds[0], scale * self.backoff_factor)


# `tf.where` broadcasts, which takes three times as long for scalars: a noticeable part of a step in small models.
_where = tf.compat.v1.where


def _increment_count(steps):
    return tf.minimum(steps, MOST_COUNTED_STEPS - 1) + 1


def _is_reached(steps, limit):
    if limit > MOST_COUNTED_STEPS:  # TensorFlow would silently convert `limit` to a negative int32
        return tf.zeros_like(steps, tf.bool)
    return steps >= limit


def checked_rule(owner: str, **arguments: Any) -> tuple[ScaleRule, dict[str, Any]]:
    """Checks arguments of a manager; `min_loss_scale` comes before `max_loss_scale`.

    Returns:
      The rule of these arguments, and the arguments as plain Python objects.
    Raises:
      TypeError: an argument has the wrong type.
      ValueError: an argument is out of its range.
    """
    rule = ScaleRule()
    for name, value in arguments.items():
        attribute, check = _RULE_ARGUMENTS[name]
        limits = {"at_least": rule.bounds[0]} if attribute == "max_scale" else {}
        if value is not None or attribute not in ("min_scale", "max_scale"):
            arguments[name] = check(owner, name, value, **limits)
        rule = dataclasses.replace(rule, **{attribute: arguments[name]})
    return rule, arguments
