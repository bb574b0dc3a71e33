"""Implements LARS: momentum whose steps are scaled by the norm of each layer's weights."""

from __future__ import annotations

import dataclasses
from typing import Any

from npu_bridge.base.own_tensorflow import tf
from npu_bridge.optimizers.rule import Rule, choice_field, flag_field, hyper_field, patterns_field


@dataclasses.dataclass(frozen=True, eq=False)
class LARS(Rule):
    """`v <- momentum * v + learning_rate * ratio * (g + weight_decay * p)`, then `p <- p - v`.

    `ratio = trust * |p| / (|g| + weight_decay * |p| + epsilon)` with the norms of a whole tensor; if a norm is 0, the
    ratio is 1.

    Args:
      learning_rate, momentum, trust, epsilon: as in the formula.
      nesterov: subtracts `momentum * v` plus the last term added to `v` from `p`.
      lr_in_momentum: False keeps learning rate and ratio out of `v`, and subtracts `learning_rate * ratio * v`.
      weight_decay: as in the formula; for `decay="coupled"` and "decoupled" see `Rule`.
      exclude_from_weight_decay: variables without weight decay.
      exclude_from_layer_adaptation: variables whose ratio is always 1; None excludes the variables without weight
        decay.
    """

    learning_rate: Any = hyper_field(0.1)
    momentum: Any = hyper_field(0.9)
    trust: Any = hyper_field(0.001)
    epsilon: Any = hyper_field(0.0)
    weight_decay: Any = hyper_field(0.0)
    exclude_from_weight_decay: Any = patterns_field()
    exclude_from_layer_adaptation: Any = patterns_field()
    nesterov: bool = flag_field(False)
    lr_in_momentum: bool = flag_field(True)
    decay: str = choice_field("in_direction", "coupled", "decoupled")

    uses_norms = True
    reads_parameter = True

    def slots(self):
        return {"momentum": 0.0}

    def amount_to_subtract(self, parameter, gradient, slots, hypers, tensors):
        rate = hypers.learning_rate
        decays = self.decay == "in_direction" and self.has_weight_decay(hypers)
        if hypers.adapts_layer:
            of_weights, of_gradient = tensors.norm(parameter), tensors.norm(gradient)
            terms = [of_gradient, hypers.epsilon * tf.ones_like(of_gradient)]
            if decays:
                terms.append(hypers.weight_decay * of_weights)
            # Three numbers added with + become one add_n, which adds them in any order: ranks could differ in a bit.
            bottom = tf.reduce_sum(terms, axis=0)
            is_both = tf.logical_and(of_weights > 0.0, of_gradient > 0.0)
            rate = rate * tf.where(is_both, hypers.trust * of_weights / bottom, tf.ones_like(of_weights))
        if decays:
            gradient = gradient + hypers.weight_decay * parameter
        newest = rate * gradient if self.lr_in_momentum else gradient
        velocity = hypers.momentum * slots["momentum"] + newest
        amount = newest + hypers.momentum * velocity if self.nesterov else velocity
        return (amount if self.lr_in_momentum else rate * amount), {"momentum": velocity}
