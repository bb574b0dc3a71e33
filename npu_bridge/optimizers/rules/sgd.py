"""Implements gradient descent, with momentum, dampening and Nesterov's look-ahead."""

from __future__ import annotations

import dataclasses
from typing import Any

from npu_bridge.base.errors import message
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.optimizers.rule import Rule, choice_field, flag_field, hyper_field, is_number, patterns_field


@dataclasses.dataclass(frozen=True, eq=False)
class SGD(Rule):
    """`v <- momentum * v + (1 - dampening) * g`, then `p <- p - learning_rate * v`; without momentum `v` is `g`.

    With `nesterov` the amount is `learning_rate * (g + momentum * v)`. The learning rate is not part of `v`, as in
    `tf.compat.v1.train.MomentumOptimizer`. Keras' SGD has it in `v`, so results differ after a change of the rate.

    Args:
      learning_rate, momentum, dampening: as in the formula.
      nesterov: use Nesterov's look-ahead; needs a momentum and no dampening.
      first_velocity: the first value of `v`: `(1 - dampening) * g` with "dampened", `g` with "gradient".
      weight_decay, decay, exclude_from_weight_decay: see `Rule`.
    """

    learning_rate: Any = hyper_field(0.01)
    momentum: Any = hyper_field(0.0)
    dampening: Any = hyper_field(0.0)
    nesterov: bool = flag_field(False)
    weight_decay: Any = hyper_field(0.0)
    decay: str = choice_field("coupled", "decoupled")
    first_velocity: str = choice_field("dampened", "gradient")
    exclude_from_weight_decay: Any = patterns_field()

    def check(self):
        plain_dampening = is_number(self.dampening) and self.dampening == 0.0
        if self.nesterov and not (self.is_hyper_on("momentum") and plain_dampening):
            problem, expected = "nesterov=True does not fit the other arguments", "a momentum above 0 and dampening=0"
            got = f"momentum={self.momentum!r}, dampening={self.dampening!r}"
            fix = "Set momentum=0.9, or nesterov=False."
            raise ValueError(message("SGD", problem, expected, got, fix))

    def slots(self):
        return {"momentum": 0.0} if self.is_hyper_on("momentum") else {}

    def amount_to_subtract(self, parameter, gradient, slots, hypers, tensors):
        if not slots:
            return hypers.learning_rate * gradient, {}
        fresh = gradient
        if self.is_hyper_on("dampening"):
            fresh = (1.0 - hypers.dampening) * gradient
            if self.first_velocity == "gradient":
                fresh = tf.where(hypers.update <= 1.0, gradient, fresh)
        velocity = hypers.momentum * slots["momentum"] + fresh
        direction = gradient + hypers.momentum * velocity if self.nesterov else velocity
        return hypers.learning_rate * direction, {"momentum": velocity}
