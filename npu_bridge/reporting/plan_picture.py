"""Draws a plan for n ranks: step time over ranks, and how much of it is communication that nothing hides."""

from __future__ import annotations

from collections.abc import Sequence

from npu_bridge.collective.cost_model import Prediction
from npu_bridge.reporting.picture_style import INK, PLAN_FILES, QUIET, SOFTWARE, new_figure, tidy, write_png

__all__ = ["draw_plan"]

_STEP, _COMPUTE, _EXPOSED = "#1f6feb", "#0f8a72", "#d9480f"


def draw_plan(predictions: Sequence[Prediction], compute_secs: float, path: str) -> None:
    """Draws predictions into a PNG file.

    Args:
      predictions: in ascending order of ranks, at least one.
      compute_secs: the step on one rank.
      path: the file to write, overwritten if it is such a picture.
    Raises:
      MissingExtraError: matplotlib is not installed.
      OSError: the file cannot be written, or is somebody else's.
    """
    figure = new_figure("draw_plan", 4.4)
    axis = figure.subplots()
    ranks = [prediction.ranks for prediction in predictions]
    milliseconds = [1000 * prediction.step_secs for prediction in predictions]
    unset = [1000 * prediction.default_step_secs for prediction in predictions]
    floor = [1000 * compute_secs] * len(ranks)
    axis.fill_between(
        ranks, floor, milliseconds, color=_EXPOSED, alpha=0.18, linewidth=0, label="exposed communication"
    )
    axis.fill_between(ranks, 0, floor, color=_COMPUTE, alpha=0.18, linewidth=0, label="computation")
    axis.plot(ranks, unset, color=QUIET, linewidth=1.4, linestyle=(0, (4, 3)), label="step, unset split")
    axis.plot(ranks, milliseconds, color=_STEP, linewidth=2.2, marker="o", markersize=4, label="step, best split")
    axis.set_xscale("log", base=2)
    axis.set_xticks(ranks, [str(number) for number in ranks])
    axis.minorticks_off()
    axis.set_ylim(bottom=0)
    axis.set_xlabel("ranks")
    axis.set_ylabel("ms")
    axis.legend(loc="upper left", frameon=False, fontsize=9, labelcolor=INK)
    tidy(axis)
    write_png(figure, path, PLAN_FILES, Software=SOFTWARE)
