"""Counts steps that are skipped one after the other, and says once what to do when nothing is trained any more."""

from __future__ import annotations

import logging

from npu_bridge.base import environment
from npu_bridge.base.errors import message, say_once

# A scale falls to 1 in some dozens of steps; who skips as many again at one scale has another problem (ours).
MOST_IN_A_ROW = 100


class SkipsInARow:
    """Skipped steps since one was not skipped, or since the loss scale last moved: while it falls, skips are normal.

    Attributes:
      count: how many.
      scale: the loss scale of the last step; None for none, and before the first step.
    """

    def __init__(self):
        self.count, self.scale = 0, None

    def add(self, skipped: bool, scale: float | None) -> None:
        """Counts a step, or a session run of several."""
        has_moved, self.scale = scale != self.scale, scale
        self.count = 0 if not skipped or has_moved else self.count
        self.count += skipped
        # Whoever raises at this number does so in the same step.
        if self.count > MOST_IN_A_ROW:
            warn_of_skips(scale)


def warn_of_skips(scale: float | None) -> None:
    """Warns, once and on rank 0, that step after step is skipped."""
    if environment.probable_rank() != 0:
        return
    problem = f"more than {MOST_IN_A_ROW} steps in a row were skipped, so nothing is trained"
    got = "gradients with a NaN or Inf" + ("" if scale is None else f", at a loss scale of {scale:g}")
    fix = (
        "If the scale is too high, take npu_bridge.amp.DynamicLossScaleManager.apex(), which finds one. Else put a "
        "npu_bridge.reporting.LossScaleCollapseHook into the hooks of the session or Estimator: it names the operator."
    )
    say_once(logging.WARNING, message("loss scale", problem, "finite gradients on all ranks", got, fix))
