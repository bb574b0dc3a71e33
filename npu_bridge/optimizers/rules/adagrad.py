"""Implements AdaGrad."""

from __future__ import annotations

import dataclasses
from typing import Any

from npu_bridge.base.own_tensorflow import tf
from npu_bridge.optimizers.rule import Rule, choice_field, flag_field, hyper_field, number_field, patterns_field


@dataclasses.dataclass(frozen=True, eq=False)
class Adagrad(Rule):
    """`h <- h + g^2`, then `p <- p - learning_rate * g / sqrt(h + epsilon)`.

    Args:
      learning_rate, epsilon: as in the formula.
      epsilon_inside: whether epsilon is added to `h` before the root is taken; otherwise it is added to the root.
      initial_accumulator: the initial value of `h`; the default of Keras is 0.1.
      weight_decay, decay, exclude_from_weight_decay: see `Rule`.
    """

    learning_rate: Any = hyper_field(0.01)
    epsilon: Any = hyper_field(1e-8)
    epsilon_inside: bool = flag_field(True)
    initial_accumulator: float = number_field(0.0)
    weight_decay: Any = hyper_field(0.0)
    decay: str = choice_field("coupled", "decoupled")
    exclude_from_weight_decay: Any = patterns_field()

    def slots(self):
        return {"accumulator": self.initial_accumulator}

    def amount_to_subtract(self, parameter, gradient, slots, hypers, tensors):
        total = slots["accumulator"] + tf.square(gradient)
        root = tf.sqrt(total + hypers.epsilon) if self.epsilon_inside else tf.sqrt(total) + hypers.epsilon
        return hypers.learning_rate * gradient / root, {"accumulator": total}
