"""Implements LAMB: Adam whose steps are scaled to the norm of each layer's weights."""

from __future__ import annotations

import dataclasses
from typing import Any

from npu_bridge.base.own_tensorflow import tf
from npu_bridge.optimizers.rule import Rule, choice_field, flag_field, hyper_field, patterns_field
from npu_bridge.optimizers.rules.adam import bias_corrections, next_moments


@dataclasses.dataclass(frozen=True, eq=False)
class LAMB(Rule):
    """`u = m / (sqrt(v) + epsilon) + weight_decay * p`, then `p <- p - learning_rate * |p|/|u| * u`.

    `m` and `v` are Adam's moments. The norms are those of a whole tensor; if a norm is 0, the quotient is 1.

    Args:
      learning_rate, beta_1, beta_2, epsilon: as in the formula.
      weight_decay: as in the formula; for `decay="coupled"` and "decoupled" see `Rule`.
      exclude_from_weight_decay: variables without weight decay.
      exclude_from_layer_adaptation: variables whose quotient is always 1; None excludes the variables without weight
        decay, as in tensorflow-addons.
      bias_correction: correct the moments for their start at 0.
      weight_norm_cap: upper bound of `|p|`; None for no bound.
      use_global_norm: divide all gradients by their global norm if the norm is above 1.
    """

    learning_rate: Any = hyper_field(0.001)
    beta_1: Any = hyper_field(0.9, below=1.0)
    beta_2: Any = hyper_field(0.999, below=1.0)
    epsilon: Any = hyper_field(1e-6)
    weight_decay: Any = hyper_field(0.0)
    exclude_from_weight_decay: Any = patterns_field()
    exclude_from_layer_adaptation: Any = patterns_field()
    bias_correction: bool = flag_field(True)
    weight_norm_cap: Any = hyper_field(None, optional=True)
    use_global_norm: bool = flag_field(False)
    decay: str = choice_field("in_direction", "coupled", "decoupled")

    uses_norms = True
    reads_parameter = True

    def slots(self):
        return {"m": 0.0, "v": 0.0}

    @property
    def uses_global_norm(self):
        return self.use_global_norm

    def gradient_factor(self, global_norm):
        return 1.0 / tf.maximum(global_norm, 1.0)

    def update_direction(self, parameter, gradient, slots, hypers):
        """Returns `u` of the formula, and the new moments."""
        mean, square = next_moments(gradient, slots, hypers)
        new = {"m": mean, "v": square}
        if self.bias_correction:
            of_mean, of_square = bias_corrections(hypers)
            mean, square = mean / of_mean, square / of_square
        direction = mean / (tf.sqrt(square) + hypers.epsilon)
        if self.decay == "in_direction" and self.has_weight_decay(hypers):
            direction = direction + hypers.weight_decay * parameter
        return direction, new

    def trust_ratio(self, weight_norm, direction_norm, hypers):
        """Returns the quotient of the norms; 1 if one of them is 0."""
        if self.weight_norm_cap is not None:
            weight_norm = tf.minimum(weight_norm, hypers.weight_norm_cap)
        is_both = tf.logical_and(weight_norm > 0.0, direction_norm > 0.0)
        return tf.where(is_both, weight_norm / direction_norm, tf.ones_like(weight_norm))

    def amount_to_subtract(self, parameter, gradient, slots, hypers, tensors):
        direction, new = self.update_direction(parameter, gradient, slots, hypers)
        if not hypers.adapts_layer:
            return hypers.learning_rate * direction, new
        ratio = self.trust_ratio(tensors.norm(parameter), tensors.norm(direction), hypers)
        return hypers.learning_rate * ratio * direction, new
