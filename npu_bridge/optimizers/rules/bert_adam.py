"""Implements BERT's Adam: without bias correction, with decay in the direction and a warm-up of its own."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from npu_bridge.base.errors import message
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.optimizers.rule import Rule, choice_field, hyper_field, number_field, patterns_field
from npu_bridge.optimizers.rules.adam import next_moments


@dataclasses.dataclass(frozen=True, eq=False)
class BertAdam(Rule):
    """`u = m / (sqrt(v) + epsilon) + weight_decay * p`, then `p <- p - learning_rate * factor(x) * u`.

    `x` is the number of updates before this one, divided by `total_steps`. The factor is `x / warmup` for `x` below
    `warmup`. From there on, it depends on `schedule`:

    - "cosine": `(1 + cos(pi x)) / 2`;
    - "constant": 1;
    - "linear": `max((x - 1) / (warmup - 1), 0)`;
    - "poly": `sqrt(1 - x)`.

    Args:
      learning_rate: must be given.
      warmup: fraction of `total_steps` during which the rate rises, at least 0 and below 1.
      total_steps: number of updates; None keeps the factor at 1.
      schedule: "linear", "cosine", "constant" or "poly".
      beta_1, beta_2, epsilon: as in the formula.
      weight_decay: as in the formula; for `decay="coupled"` and "decoupled" see `Rule`.
      exclude_from_weight_decay: variables without weight decay.
      max_grad_norm: scale all gradients down so that their global norm is at most this; None for no bound.
    """

    learning_rate: Any = hyper_field(None)
    warmup: Any = hyper_field(0.0, below=1.0)
    total_steps: Any = number_field(None, low=1.0, optional=True)
    schedule: str = choice_field("linear", "cosine", "constant", "poly")
    beta_1: Any = hyper_field(0.9, below=1.0)
    beta_2: Any = hyper_field(0.99, below=1.0)
    epsilon: Any = hyper_field(1e-6)
    weight_decay: Any = hyper_field(0.01)
    exclude_from_weight_decay: Any = patterns_field()
    max_grad_norm: Any = number_field(None, optional=True)
    decay: str = choice_field("in_direction", "coupled", "decoupled")

    def check(self):
        if self.max_grad_norm == 0.0:
            problem, fix = "max_grad_norm would make every gradient 0", "Use None for no bound."
            raise ValueError(message("BertAdam", problem, "a number above 0", "0", fix))

    def slots(self):
        return {"m": 0.0, "v": 0.0}

    @property
    def uses_global_norm(self):
        return self.max_grad_norm is not None

    def gradient_factor(self, global_norm):
        return self.max_grad_norm / tf.maximum(global_norm, self.max_grad_norm)

    def rate_factor(self, hypers):
        """Returns the factor of the learning rate in this update."""
        if self.total_steps is None:
            return 1.0
        share = (hypers.update - 1.0) / self.total_steps
        after = {
            "linear": lambda: tf.maximum((share - 1.0) / (hypers.warmup - 1.0), 0.0),
            "cosine": lambda: 0.5 * (1.0 + tf.cos(math.pi * share)),
            "constant": lambda: tf.ones_like(share),
            "poly": lambda: tf.sqrt(tf.maximum(1.0 - share, 0.0)),
        }[self.schedule]()
        return tf.where(share < hypers.warmup, tf.math.divide_no_nan(share, hypers.warmup), after)

    def amount_to_subtract(self, parameter, gradient, slots, hypers, tensors):
        mean, square = next_moments(gradient, slots, hypers)
        direction = mean / (tf.sqrt(square) + hypers.epsilon)
        if self.decay == "in_direction" and self.has_weight_decay(hypers):
            direction = direction + hypers.weight_decay * parameter
        return hypers.learning_rate * self.rate_factor(hypers) * direction, {"m": mean, "v": square}
