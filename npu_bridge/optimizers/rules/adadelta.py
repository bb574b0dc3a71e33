"""Implements Adadelta."""

from __future__ import annotations

import dataclasses
from typing import Any

from npu_bridge.base.own_tensorflow import tf
from npu_bridge.optimizers.rule import Rule, choice_field, hyper_field, patterns_field


@dataclasses.dataclass(frozen=True, eq=False)
class Adadelta(Rule):
    """`s <- rho*s + (1-rho)*g^2`, `d = sqrt(a+epsilon) / sqrt(s+epsilon) * g`, `a <- rho*a + (1-rho)*d^2`.

    Then `learning_rate * d` is subtracted from the parameter.

    Args:
      learning_rate, rho, epsilon: as in the formula.
      weight_decay, decay, exclude_from_weight_decay: see `Rule`.
    """

    learning_rate: Any = hyper_field(1.0)
    rho: Any = hyper_field(0.9, below=1.0)
    epsilon: Any = hyper_field(1e-6)
    weight_decay: Any = hyper_field(0.0)
    decay: str = choice_field("coupled", "decoupled")
    exclude_from_weight_decay: Any = patterns_field()

    def slots(self):
        return {"accumulated_gradient": 0.0, "accumulated_amount": 0.0}

    def amount_to_subtract(self, parameter, gradient, slots, hypers, tensors):
        squares = hypers.rho * slots["accumulated_gradient"] + (1.0 - hypers.rho) * tf.square(gradient)
        past = slots["accumulated_amount"]
        direction = tf.sqrt(past + hypers.epsilon) / tf.sqrt(squares + hypers.epsilon) * gradient
        amounts = hypers.rho * past + (1.0 - hypers.rho) * tf.square(direction)
        return hypers.learning_rate * direction, {"accumulated_gradient": squares, "accumulated_amount": amounts}
