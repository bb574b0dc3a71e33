"""Counts skipped steps in a row, and warns once with a remedy when training no longer progresses."""

from __future__ import annotations

import logging
import math

from npu_bridge.base import environment
from npu_bridge.base.errors import message, say_once

# A scale falls to 1 within some dozens of steps; more skips than that at one scale have another cause (our limit).
MOST_IN_A_ROW = 100
# Skipped steps in a row that are reported where the scale is not the cause (our limit). One or two batches can be bad.
MOST_IN_VAIN = 10


class SkipsInARow:
    """Counts steps skipped in a row since the loss scale last moved: while the scale falls, skips are normal.

    They are not where the loss itself is NaN or Inf, or where nothing is scaled up: no other scale helps then.

    Attributes:
      count: the number of steps.
      scale: the loss scale of the last step; None without loss scaling.

    Args:
      scale: the loss scale before the first step, if it is known.
    """

    def __init__(self, scale: float | None = None):
        self.count, self.scale = 0, scale
        self._in_vain = 0

    def add(self, skipped: bool, scale: float | None, loss: float | None = None, steps: int = 1) -> None:
        """Counts a step, several steps that were all skipped, or a session run of several; the loss can be unknown."""
        has_moved, self.scale = scale != self.scale, scale
        self.count = 0 if not skipped or has_moved else self.count
        self.count += skipped * (1 if has_moved else steps)
        # Callers that raise at this number do so in the same step.
        if self.count > MOST_IN_A_ROW:
            _warn_of_skips(scale)
        is_in_vain = scale is None or scale <= 1 or not math.isfinite(loss or 0.0)
        before, self._in_vain = self._in_vain, self._in_vain + steps if skipped and is_in_vain else 0
        if before < MOST_IN_VAIN <= self._in_vain:
            _warn_of_cause(scale, loss)


def _warn_of_skips(scale: float | None) -> None:
    """Warns, once and on rank 0, that step after step is skipped."""
    if environment.probable_rank() != 0:
        return
    problem = f"more than {MOST_IN_A_ROW} steps in a row were skipped, so nothing is trained"
    got = "gradients with a NaN or Inf" + ("" if scale is None else f", at a loss scale of {scale:g}")
    fix = (
        "If the scale is too high, use npu_bridge.amp.DynamicLossScaleManager.apex(), which finds one. Else add a "
        "npu_bridge.reporting.LossScaleCollapseHook to the hooks of the session or Estimator: it names the operator."
    )
    say_once(logging.WARNING, message("loss scale", problem, "finite gradients on all ranks", got, fix))


def _warn_of_cause(scale: float | None, loss: float | None) -> None:
    """Warns on rank 0 that steps are skipped for a reason other than the scale."""
    if environment.probable_rank() != 0:
        return
    problem = f"{MOST_IN_VAIN} steps in a row were skipped, and no loss scale helps"
    expected = "a finite loss, and gradients that are finite at a scale of 1"
    got = f"a loss of {'unknown value' if loss is None else f'{loss:g}'}"
    got += " without a loss scale" if scale is None else f" at a loss scale of {scale:g}"
    fix = (
        "Look for log(0), 0/0, a row of attention that is masked altogether, or values beyond 65504 in 16 bits. A "
        "npu_bridge.reporting.LossScaleCollapseHook among the hooks names the operator, and so does "
        "tf.debugging.enable_check_numerics() in Keras."
    )
    say_once(logging.WARNING, message("loss scale", problem, expected, got, fix))
