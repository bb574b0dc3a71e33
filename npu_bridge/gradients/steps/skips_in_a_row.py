"""Counts consecutive skipped steps, and warns once, with a remedy, when training no longer progresses."""

from __future__ import annotations

import logging
import math
from typing import Any

from npu_bridge.base import environment
from npu_bridge.base.errors import message, say_once
from npu_bridge.gradients.collections import COLLAPSE_HOOKS

# A scale falls to 1 within some dozens of steps; this many skips at one scale have another cause (our limit).
MOST_IN_A_ROW = 100
# Consecutive skips that are reported if the scale is not their cause (our limit). One or two batches can be bad.
MOST_NOT_CAUSED_BY_SCALE = 10


class SkipsInARow:
    """A counter of consecutive skipped steps since the last change of the loss scale.

    Skips are normal while the scale falls. They are not normal if the loss itself is NaN or Inf, or if the scale is at
    most 1 or missing: then no other scale helps.

    Attributes:
      count: number of consecutive skipped steps.
      scale: the loss scale of the last step; None without loss scaling.
      graph: the argument.

    Args:
      scale: the loss scale before the first step, if it is known.
      graph: the graph of the session that trains; None in `model.fit`, which has no hooks.
    """

    def __init__(self, scale: float | None = None, graph: Any = None):
        self.count, self.scale = 0, scale
        self.graph = graph
        self._not_caused_by_scale = 0

    def count_steps(self, skipped: bool, scale: float | None, loss: float | None = None, steps: int = 1) -> None:
        """Counts steps, and warns when a limit is reached.

        Args:
          skipped: whether all these steps were skipped.
          scale: the loss scale; None without loss scaling.
          loss: the loss; None if unknown.
          steps: the number of steps: one, or several of a session run.
        """
        has_moved, self.scale = scale != self.scale, scale
        self.count = 0 if not skipped or has_moved else self.count
        self.count += skipped * (1 if has_moved else steps)
        # Callers that raise an error at this count do so in the same step.
        if self.count > MOST_IN_A_ROW:
            _warn_of_skips(scale, self.graph)
        is_not_caused_by_scale = scale is None or scale <= 1 or not math.isfinite(loss or 0.0)
        before, self._not_caused_by_scale = (
            self._not_caused_by_scale,
            self._not_caused_by_scale + steps if skipped and is_not_caused_by_scale else 0,
        )
        if before < MOST_NOT_CAUSED_BY_SCALE <= self._not_caused_by_scale:
            _warn_of_cause(scale, loss, self.graph)


def _advice_to_find_operator(graph: Any) -> str:
    """Returns how to find the operator that makes the first NaN or Inf."""
    if graph is None:
        return "Call tf.debugging.enable_check_numerics() at the start of the script: it names the operator."
    if graph.get_collection(COLLAPSE_HOOKS):
        return "If the next steps are skipped, too, LossScaleCollapseHook names the operator."
    return "Add a npu_bridge.reporting.LossScaleCollapseHook to the hooks: it names the operator."


def _warn_of_skips(scale: float | None, graph: Any) -> None:
    """Warns once, on rank 0, that all steps are skipped."""
    if environment.probable_rank() != 0:
        return
    problem = f"more than {MOST_IN_A_ROW} steps in a row were skipped, so nothing is trained"
    got = "gradients with a NaN or Inf" + ("" if scale is None else f", at a loss scale of {scale:g}")
    lower = "If the scale is too high, use npu_bridge.amp.DynamicLossScaleManager.apex(), which finds a scale. "
    fix = f"{'' if scale is not None and scale <= 1 else lower}{_advice_to_find_operator(graph)}"
    say_once(logging.WARNING, message("loss scale", problem, "finite gradients on all ranks", got, fix))


def _warn_of_cause(scale: float | None, loss: float | None, graph: Any) -> None:
    """Warns once, on rank 0, that steps are skipped for a reason other than the loss scale."""
    if environment.probable_rank() != 0:
        return
    problem = f"{MOST_NOT_CAUSED_BY_SCALE} steps in a row were skipped, and no loss scale helps"
    expected = "a finite loss, and gradients that are finite at a scale of 1"
    got = f"a loss of {'unknown value' if loss is None else f'{loss:g}'}"
    got += " without a loss scale" if scale is None else f" at a loss scale of {scale:g}"
    fix = (
        "Look for log(0), 0/0, a row of attention that is masked altogether, or values beyond 65504 in 16 bits. "
        f"{_advice_to_find_operator(graph)}"
    )
    say_once(logging.WARNING, message("loss scale", problem, expected, got, fix))
