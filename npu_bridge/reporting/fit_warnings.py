"""Warns of a `fit` that goes wrong: skipped steps, a loss or weights that are NaN, gradients that are not applied."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base.errors import message, say_once
from npu_bridge.gradients.checkpoints.sync import batch_counters
from npu_bridge.gradients.steps.skips_in_a_row import MOST_NOT_CAUSED_BY_SCALE, SkipsInARow
from npu_bridge.reporting.keras_numbers import OptimizerNumbers


class FitWarnings:
    """The warnings that rank 0 logs about a `fit`; other ranks log none.

    After ten steps and at the end of each epoch, warns if all steps are skipped (`SkipsInARow`), and once if
    `warn_of_nan` finds NaN or Inf. At the end of `fit`, warns if accumulated gradients are not applied yet. A callback
    calls the methods with the model that is trained.
    """

    def __init__(self):
        self._before = self._skips = None
        self._has_warned_of_nan = self._is_after_ten_steps = False

    def begin_epoch(self, model: Any) -> None:
        self._before, self._is_after_ten_steps = _optimizer_numbers(model.optimizer), False
        if self._before is not None and self._skips is None:
            self._skips = SkipsInARow(self._before.loss_scale)

    def end_batch(self, model: Any, batch: int, logs: dict | None) -> None:
        if batch + 1 >= MOST_NOT_CAUSED_BY_SCALE and not self._is_after_ten_steps:
            self._is_after_ten_steps = True
            self.end_epoch(model, logs)

    def end_epoch(self, model: Any, logs: dict | None) -> None:
        loss = None if not logs or "loss" not in logs else float(logs["loss"])
        before, self._before = self._before, _optimizer_numbers(model.optimizer)
        if not self._has_warned_of_nan and collective.current().rank == 0:
            self._has_warned_of_nan = warn_of_nan(model, loss)
        if before is None or before.skipped_steps == self._before.skipped_steps:
            return
        steps = int(self._before.skipped_steps - before.skipped_steps)
        self._skips.count_steps(before.step == self._before.step, self._before.loss_scale, loss, steps)

    def end_fit(self, model: Any) -> None:
        if tf.executing_eagerly() and collective.current().rank == 0:
            warn_of_unapplied_gradients(model.optimizer)


def warn_of_nan(model: Any, loss: float | None) -> bool:
    """Warns if a weight is NaN or Inf, or if the loss is NaN and such steps are not skipped; returns whether it warned.

    The loss does not always show bad weights: on some processors, TensorFlow's Relu turns NaN into 0.
    """
    fix = "Lower the learning rate, or look for a log(0), a 0/0 or a NaN in the data of any rank."
    can_skip = getattr(model.optimizer, "skipped_steps", None) is not None
    if not can_skip:
        fix += " With FixedLossScaleManager(1), npu_keras_optimizer skips such steps on all ranks."
    if loss is not None and np.isnan(loss) and not can_skip:
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


def warn_of_unapplied_gradients(optimizer: Any) -> None:
    """Warns if gradients of the last batches are accumulated and wait for more batches before an update."""
    count = max(map(int, batch_counters(optimizer)), default=0)
    if count:
        batches = f"{count} batch{'' if count == 1 else 'es'}"
        problem = f"the gradients of {batches} are not applied yet"
        fix = "Train further to apply them, or change the number of batches."
        text = message("fit", problem, "batches of whole updates", f"{batches} more", fix)
        say_once(logging.WARNING, text)


def _optimizer_numbers(optimizer):
    counts = getattr(optimizer, "skipped_steps", None) is not None
    return OptimizerNumbers.of(optimizer) if counts and collective.current().rank == 0 else None


def _is_finite(weight: Any) -> bool:
    value = tf.convert_to_tensor(weight)
    return not value.dtype.is_floating or bool(tf.reduce_all(tf.math.is_finite(value)))
