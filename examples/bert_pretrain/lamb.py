"""The LAMB optimizer under its documented argument names, and the learning-rate schedule it follows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from npu_bridge import optimizers


class LAMBOptimizer(optimizers.tf1.LAMB):
    """Layer-wise adaptive moments with decoupled weight decay (You et al. 2019), all variables updated together.

    Args:
      learning_rate: a number, or a Keras learning-rate schedule. The schedule gets the number of updates; skipped
        steps do not count.
      weight_decay_rate: share of a variable added to its update before the layer-wise ratio.
      beta_1: decay of the first moment.
      beta_2: decay of the second moment.
      epsilon: added to the root of the second moment.
      exclude_from_weight_decay: regular expressions; a variable whose name contains a match has neither
        weight decay nor a layer-wise ratio, as in the published code of the paper.
      name: second-to-last part of the slots' names.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        weight_decay_rate: float = 0.01,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-6,
        exclude_from_weight_decay: Sequence[str] | None = None,
        name: str = "LAMB",
    ):
        super().__init__(
            learning_rate=learning_rate,
            weight_decay=weight_decay_rate,
            beta_1=beta_1,
            beta_2=beta_2,
            epsilon=epsilon,
            exclude_from_weight_decay=exclude_from_weight_decay,
            name=name,
            fused=True,
        )


class WarmupThenLinearDecay(tf.keras.optimizers.schedules.LearningRateSchedule):
    """A learning rate that rises in a straight line from 0 to the peak, then falls in a straight line to 0 at the end.

    The first update uses `peak / warmup_steps`, never 0.

    Args:
      peak: the highest learning rate, reached after `warmup_steps` updates.
      warmup_steps: updates of the rising part; 0 starts at the peak.
      total_steps: updates of the whole run.
    Raises:
      ValueError: the rising part is not shorter than the run.
    """

    def __init__(self, peak: float, warmup_steps: int, total_steps: int):
        if not 0 <= warmup_steps < total_steps:
            raise ValueError(
                f"WarmupThenLinearDecay: expected warmup_steps from 0 to below total_steps={total_steps}; "
                f"got {warmup_steps}. Lower --num_warmup_steps or raise --num_train_steps."
            )
        self.peak = peak
        self.warmup_steps = warmup_steps
        self.total_steps = total_steps

    def __call__(self, step):
        """Returns the learning rate of update number `step`, counted from 0; float32 scalar."""
        with tf.name_scope("learning_rate"):
            done = tf.cast(step, tf.float32)
            rising = (done + 1.0) / max(self.warmup_steps, 1)
            falling = (self.total_steps - done) / (self.total_steps - self.warmup_steps)
            return self.peak * tf.maximum(tf.minimum(rising, falling), 0.0)

    def get_config(self):
        """Returns the constructor's arguments."""
        return {"peak": self.peak, "warmup_steps": self.warmup_steps, "total_steps": self.total_steps}
