"""Implements AdamP: Adam without the part of a step that only makes scale-invariant weights longer."""

from __future__ import annotations

import dataclasses
from typing import Any

from npu_bridge.base.own_tensorflow import tf
from npu_bridge.optimizers.rule import Rule, choice_field, flag_field, hyper_field, patterns_field
from npu_bridge.optimizers.rules.adam import bias_corrections, next_moments

_SMALLEST_NORM = 1e-8


@dataclasses.dataclass(frozen=True, eq=False)
class AdamP(Rule):
    """Adam that leaves out the part of a step along the weights if their gradient is nearly orthogonal to them.

    Only tensors of two or more dimensions are projected: by output channel (last axis), or else as a whole. If the
    largest `|cos(g, p)|` is below `delta / sqrt(elements)`, the part of the step along `p` is removed and the weight
    decay is multiplied by `wd_ratio`.

    Args:
      learning_rate, beta_1, beta_2, epsilon: as in `Adam`, with the epsilon of the paper.
      delta: bound of the cosine, as in the condition.
      wd_ratio: factor of the weight decay where the step is projected.
      nesterov: use Nesterov's look-ahead.
      weight_decay: `learning_rate * weight_decay * parameter` is also subtracted from the parameter.
      decay, exclude_from_weight_decay: see `Rule`.
    """

    learning_rate: Any = hyper_field(0.001)
    beta_1: Any = hyper_field(0.9, below=1.0)
    beta_2: Any = hyper_field(0.999, below=1.0)
    epsilon: Any = hyper_field(1e-8)
    weight_decay: Any = hyper_field(0.0)
    delta: Any = hyper_field(0.1)
    wd_ratio: Any = hyper_field(0.1)
    nesterov: bool = flag_field(False)
    decay: str = choice_field("projected", "coupled", "decoupled")
    exclude_from_weight_decay: Any = patterns_field()

    is_elementwise_or_norms = False
    reads_parameter = True

    def slots(self):
        return {"m": 0.0, "v": 0.0}

    def amount_to_subtract(self, parameter, gradient, slots, hypers, tensors):
        mean, square = next_moments(gradient, slots, hypers)
        of_mean, of_square = bias_corrections(hypers)
        ahead = hypers.beta_1 * mean + (1.0 - hypers.beta_1) * gradient if self.nesterov else mean
        direction = ahead / (tf.sqrt(square / of_square) + hypers.epsilon) / of_mean
        decay_factor = tf.ones([], gradient.dtype)
        if parameter.shape.rank is not None and parameter.shape.rank > 1:
            direction, decay_factor = _project_direction(parameter, gradient, direction, hypers)
        amount = hypers.learning_rate * direction
        if self.decay == "projected" and self.has_weight_decay(hypers):
            amount = amount + hypers.learning_rate * hypers.weight_decay * decay_factor * parameter
        return amount, {"m": mean, "v": square}


def _project_direction(parameter, gradient, direction, hypers):
    """Returns the direction without its part along scale-invariant parameters, and the factor of the weight decay."""
    results = direction, tf.ones([], direction.dtype)
    by_channel = list(range(parameter.shape.rank - 1))
    for axes in (None, by_channel):  # if both conditions hold, the result by channel is used
        width = tf.cast(tf.size(parameter), direction.dtype)
        if axes is not None:
            width = width / tf.cast(tf.shape(parameter)[-1], direction.dtype)
        is_idle = tf.reduce_max(_cosine(gradient, parameter, axes)) < hypers.delta / tf.sqrt(width)
        unit = parameter / (_norm(parameter, axes) + _SMALLEST_NORM)
        orthogonal = direction - unit * tf.reduce_sum(unit * direction, axes, keepdims=True)
        results = tf.where(is_idle, orthogonal, results[0]), tf.where(is_idle, hypers.wd_ratio, results[1])
    return results


def _norm(values, axes):
    return tf.sqrt(tf.reduce_sum(tf.square(values), axes, keepdims=True))


def _cosine(first, second, axes):
    norms = (_norm(first, axes) + _SMALLEST_NORM) * (_norm(second, axes) + _SMALLEST_NORM)
    return tf.abs(tf.reduce_sum(first * second, axes, keepdims=True)) / norms
