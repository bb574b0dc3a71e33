"""Implements Adam and AdamW, and the moment estimates that LAMB, AdamP and BertAdam share with them."""

from __future__ import annotations

import dataclasses
from typing import Any

from npu_bridge.base.own_tensorflow import tf
from npu_bridge.optimizers.rule import Rule, choice_field, flag_field, hyper_field, patterns_field


def next_moments(gradient, slots, hypers):
    """Returns the new mean and mean square of the gradient, as all rules of Adam's family keep them."""
    mean = hypers.beta_1 * slots["m"] + (1.0 - hypers.beta_1) * gradient
    square = hypers.beta_2 * slots["v"] + (1.0 - hypers.beta_2) * tf.square(gradient)
    return mean, square


def bias_corrections(hypers):
    """Returns two factors by which to divide the moments, which start at 0 and so are too small in early updates."""
    return 1.0 - tf.pow(hypers.beta_1, hypers.update), 1.0 - tf.pow(hypers.beta_2, hypers.update)


@dataclasses.dataclass(frozen=True, eq=False)
class Adam(Rule):
    """`m <- b1*m + (1-b1)*g`, `v <- b2*v + (1-b2)*g^2`, and a step along `m / sqrt(v)`, both bias-corrected.

    With `c1 = 1 - b1^k` and `c2 = 1 - b2^k` in update k, the amount subtracted is

    - `learning_rate * sqrt(c2)/c1 * m / (sqrt(v) + epsilon)` with `epsilon_placement="tf"`, as in TF 1 and Keras;
    - `learning_rate * (m/c1) / (sqrt(v/c2) + epsilon)` with "corrected", as in the paper.

    Args:
      learning_rate, beta_1, beta_2, epsilon: as in the formula.
      epsilon_placement: "tf" or "corrected".
      amsgrad: divide by the largest `v` so far.
      weight_decay, decay, exclude_from_weight_decay: see `Rule`.
    """

    learning_rate: Any = hyper_field(0.001)
    beta_1: Any = hyper_field(0.9, below=1.0)
    beta_2: Any = hyper_field(0.999, below=1.0)
    epsilon: Any = hyper_field(1e-8)
    weight_decay: Any = hyper_field(0.0)
    epsilon_placement: str = choice_field("tf", "corrected")
    amsgrad: bool = flag_field(False)
    decay: str = choice_field("coupled", "decoupled")
    exclude_from_weight_decay: Any = patterns_field()

    def slots(self):
        return {"m": 0.0, "v": 0.0, **({"v_max": 0.0} if self.amsgrad else {})}

    def amount_to_subtract(self, parameter, gradient, slots, hypers, tensors):
        mean, square = next_moments(gradient, slots, hypers)
        new = {"m": mean, "v": square}
        if self.amsgrad:
            square = new["v_max"] = tf.maximum(slots["v_max"], square)
        of_mean, of_square = bias_corrections(hypers)
        if self.epsilon_placement == "tf":
            rate = hypers.learning_rate * tf.sqrt(of_square) / of_mean
            return rate * mean / (tf.sqrt(square) + hypers.epsilon), new
        return hypers.learning_rate / of_mean * mean / (tf.sqrt(square / of_square) + hypers.epsilon), new


@dataclasses.dataclass(frozen=True, eq=False)
class AdamW(Adam):
    """Adam with decoupled weight decay: the parameter is also lowered by `learning_rate * weight_decay * parameter`.

    Args: as in `Adam`.
    """

    weight_decay: Any = hyper_field(0.01)
    decay: str = choice_field("decoupled", "coupled")
