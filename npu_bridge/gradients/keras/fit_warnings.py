"""Warns of the numbers of a `fit`: a loss or weights that are NaN, and gradients that are not applied at its end."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from npu_bridge.base.errors import message, say_once
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.gradients.checkpoints.sync import batch_counters


def warn_of_nan(model: Any, loss: Any) -> bool:
    """Warns if the loss is NaN, or else if a weight is NaN or Inf; returns whether it has warned.

    The loss does not always show bad weights: on a CPU, TensorFlow's Relu turns NaN into 0.
    """
    fix = "Lower the learning rate, or look for a log(0), a 0/0 or a NaN in the data of any rank."
    can_skip = getattr(model.optimizer, "skipped_steps", None) is not None
    if not can_skip:
        fix += " With FixedLossScaleManager(1), npu_keras_optimizer skips such steps on all ranks."
    if loss is not None and np.isnan(float(loss)) and not can_skip:
        text = message("loss", "it is NaN", "a number", "NaN in fit", fix)
    else:
        weights = list(model.trainable_variables) if tf.executing_eagerly() else []
        bad = [weight for weight in weights if not _is_finite(weight)]
        if not bad:
            return False
        problem = f"{len(bad)} of {len(weights)} trainable weights are NaN or Inf"
        name = getattr(bad[0], "path", bad[0].name)
        text = message("fit", problem, "finite weights", f"NaN or Inf in {name}", fix)
    say_once(logging.WARNING, text)
    return True


def warn_of_open_window(optimizer: Any) -> None:
    """Warns if gradients of the last batches are accumulated and wait for more batches before an update."""
    count = max(map(int, batch_counters(optimizer)), default=0)
    if count:
        problem = f"the gradients of {count} batch{'' if count == 1 else 'es'} are not applied yet"
        fix = "Train on to apply them, or change the number of batches."
        text = message("fit", problem, "a whole number of windows of Accumulate", f"{count} more", fix)
        say_once(logging.WARNING, text)


def _is_finite(weight: Any) -> bool:
    value = tf.convert_to_tensor(weight)
    return not value.dtype.is_floating or bool(tf.reduce_all(tf.math.is_finite(value)))
