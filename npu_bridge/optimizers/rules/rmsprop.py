"""Implements RMSProp in the four forms that frameworks use."""

from __future__ import annotations

import dataclasses
from typing import Any

from npu_bridge.base.own_tensorflow import tf
from npu_bridge.optimizers.rule import Rule, choice_field, flag_field, hyper_field, number_field, patterns_field


@dataclasses.dataclass(frozen=True, eq=False)
class RMSProp(Rule):
    """`r <- rho * r + (1 - rho) * g^2`, then `p <- p - learning_rate * g / sqrt(r + epsilon)`.

    Args:
      learning_rate, rho, momentum, epsilon: as in the formula; with a momentum, the amount comes from a momentum
        buffer.
      centered: subtract the square of the mean gradient from `r`.
      epsilon_inside: whether epsilon is added to `r` before the root is taken; otherwise it is added to the root.
      lr_in_momentum: whether the buffer holds amounts (`b <- momentum * b + learning_rate * g / ...`) or directions.
      initial_accumulator: the initial value of `r`; `tf.compat.v1.train.RMSPropOptimizer` starts with 1.
      weight_decay, decay, exclude_from_weight_decay: see `Rule`; "decoupled_unscaled" subtracts
        `weight_decay * parameter` from the parameter, without the learning rate.
    """

    learning_rate: Any = hyper_field(0.01)
    rho: Any = hyper_field(0.9, below=1.0)
    momentum: Any = hyper_field(0.0)
    epsilon: Any = hyper_field(1e-8)
    centered: bool = flag_field(False)
    epsilon_inside: bool = flag_field(True)
    lr_in_momentum: bool = flag_field(True)
    initial_accumulator: float = number_field(0.0)
    weight_decay: Any = hyper_field(0.0)
    decay: str = choice_field("coupled", "decoupled", "decoupled_unscaled")
    exclude_from_weight_decay: Any = patterns_field()

    def slots(self):
        slots = {"rms": self.initial_accumulator}
        if self.centered:
            slots["mean_gradient"] = 0.0
        if self.is_hyper_on("momentum"):
            slots["momentum"] = 0.0
        return slots

    def amount_to_subtract(self, parameter, gradient, slots, hypers, tensors):
        new = {"rms": hypers.rho * slots["rms"] + (1.0 - hypers.rho) * tf.square(gradient)}
        variance = new["rms"]
        if self.centered:
            new["mean_gradient"] = hypers.rho * slots["mean_gradient"] + (1.0 - hypers.rho) * gradient
            variance = tf.maximum(variance - tf.square(new["mean_gradient"]), 0.0)  # by rounding it can be below 0
        root = tf.sqrt(variance + hypers.epsilon) if self.epsilon_inside else tf.sqrt(variance) + hypers.epsilon
        direction = gradient / root
        if "momentum" not in slots:
            return hypers.learning_rate * direction, new
        if self.lr_in_momentum:
            new["momentum"] = hypers.momentum * slots["momentum"] + hypers.learning_rate * direction
            return new["momentum"], new
        new["momentum"] = hypers.momentum * slots["momentum"] + direction
        return hypers.learning_rate * new["momentum"], new
