"""Draws a training or a plan with matplotlib into PNG files, on request. Report pages have SVG charts instead."""

from __future__ import annotations

import math
from collections.abc import Sequence

from npu_bridge.base.secondary_files import NonFatalOutput
from npu_bridge.collective.cost_model import StepPrediction
from npu_bridge.reporting.history import History, StepRow, list_rows_and_starts
from npu_bridge.reporting.page.axes import make_power_of_two_axis, needs_logarithm
from npu_bridge.reporting.page.curves import smooth_trend
from npu_bridge.reporting.picture_style import (
    COLOURS,
    INK,
    PLAN_FILES,
    QUIET,
    SOFTWARE,
    new_figure,
    style_axis,
    write_png,
)
from npu_bridge.reporting.progress_line import format_loss, format_steps
from npu_bridge.reporting.summary import format_summary, summarize

_BLUE, _GREEN, _RED = (COLOURS[name][0] for name in ("loss", "scale", "skip"))


def draw_training(history: History, path: str, title: str = "") -> None:
    """Draws a history into a PNG file: the loss, the loss scale below it, and marks for overflows and restarts.

    Args:
      history: the history of a run; all its sessions are in one picture.
      path: the file to write, overwritten if it exists.
      title: title above the picture; may be empty.
    Raises:
      MissingExtraError: matplotlib is not installed.
      ValueError: the history holds no step.
    """
    NonFatalOutput(f"the picture {path}").attempt(_draw_training, history, path, title)


def _draw_training(history: History, path: str, title: str) -> None:
    rows, places, starts = list_rows_and_starts(history)
    scaled = any(row.loss_scale is not None for row in rows)
    figure = new_figure("draw_training", 6.2 if scaled else 4.4)
    if not rows:
        raise ValueError(f"draw_training: {history.path} holds no step; there is nothing to draw.")
    if scaled:
        above, below = axes = figure.subplots(2, 1, sharex=True, height_ratios=[2.6, 1])
        _draw_scale(below, places, rows)
    else:
        above = figure.subplots()
        axes = [above]
    summary = summarize(history)
    _draw_loss(above, places, rows, summary.last_loss)
    for axis in axes:
        style_axis(axis)
        _mark_restarts(axis, [places[at - 1] for at in starts if at], labelled=axis is above)
    axes[-1].set_xlabel("step" if not history.skipped_steps else "step, skipped ones included")
    above.set_title(title, loc="left", pad=24, fontsize=13, fontweight="bold", color=INK)
    above.text(0.0, 1.03, format_summary(summary), transform=above.transAxes, fontsize=10, color=QUIET)
    write_png(figure, path)


def draw_plan(predictions: Sequence[StepPrediction], compute_secs: float, path: str) -> None:
    """Draws predictions into a PNG file: the step time by number of ranks, and the exposed communication in it.

    Args:
      predictions: at least one prediction, in ascending order of ranks.
      compute_secs: time of the step on one rank.
      path: the file to write; an existing file is overwritten only if it is a picture of a plan.
    Raises:
      MissingExtraError: matplotlib is not installed.
      OSError: the file cannot be written, or holds something else.
    """
    figure = new_figure("draw_plan", 4.4)
    axis = figure.subplots()
    ranks = [prediction.ranks for prediction in predictions]
    milliseconds = [1000 * prediction.step_secs for prediction in predictions]
    unset = [1000 * prediction.default_step_secs for prediction in predictions]
    floor = [1000 * compute_secs] * len(ranks)
    axis.fill_between(ranks, floor, milliseconds, color=_RED, alpha=0.18, linewidth=0, label="exposed communication")
    axis.fill_between(ranks, 0, floor, color=_GREEN, alpha=0.18, linewidth=0, label="computation")
    axis.plot(ranks, unset, color=QUIET, linewidth=1.4, linestyle=(0, (4, 3)), label="step, unset split")
    axis.plot(ranks, milliseconds, color=_BLUE, linewidth=2.2, marker="o", markersize=4, label="step, best split")
    axis.set_xscale("log", base=2)
    axis.set_xticks(ranks, [str(number) for number in ranks])
    axis.minorticks_off()
    axis.set_ylim(bottom=0)
    axis.set_xlabel("ranks")
    axis.set_ylabel("ms")
    axis.legend(loc="upper left", frameon=False, fontsize=9, labelcolor=INK)
    style_axis(axis)
    write_png(figure, path, PLAN_FILES, Software=SOFTWARE)


def _draw_loss(axis, places: Sequence[int], rows: Sequence[StepRow], last_loss: float | None):
    points = [(place, row.loss) for place, row in zip(places, rows) if row.loss is not None]
    axis.set_ylabel("loss")
    if not points:
        return
    x, losses = zip(*points)
    axis.plot(x, losses, color=_BLUE, alpha=0.22, linewidth=1.0)
    axis.plot(x, smooth_trend(losses), color=_BLUE, linewidth=2.2, solid_capstyle="round")
    finite = [loss for loss in losses if math.isfinite(loss)]
    if finite and needs_logarithm(min(finite), max(finite)):
        axis.set_yscale("log")
    if last_loss is not None and math.isfinite(last_loss):
        axis.annotate(
            format_loss(last_loss),
            (x[-1], last_loss),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=_BLUE,
            fontweight="bold",
            annotation_clip=False,
        )


def _draw_scale(axis, places: Sequence[int], rows: Sequence[StepRow]):
    points = [(place, row.loss_scale, row.skipped) for place, row in zip(places, rows) if row.loss_scale]
    scales = [scale for _, scale, _ in points]
    axis.step([place for place, _, _ in points], scales, where="mid", color=_GREEN, linewidth=1.8)
    axis.set_yscale("log", base=2)
    axis.set_ylabel("loss scale")
    y = make_power_of_two_axis([scale for scale in scales if math.isfinite(scale) and scale > 0] or [1.0])
    axis.set_ylim(y.low, y.high)
    overflows = [(place, scale) for place, scale, skipped in points if skipped]
    if overflows:
        label = f"overflow, {format_steps(len(overflows))} skipped"
        axis.scatter(*zip(*overflows), marker="v", s=34, color=_RED, zorder=3, label=label)
        axis.legend(loc="best", frameon=False, fontsize=9, labelcolor=INK)


def _mark_restarts(axis, restarts: Sequence[int], labelled: bool):
    for place in restarts:
        axis.axvline(place, color=QUIET, linewidth=1.0, linestyle=(0, (4, 3)), zorder=1)
        if labelled:
            axis.annotate(
                "restart",
                (place, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(4, -4),
                textcoords="offset points",
                va="top",
                fontsize=8,
                color=QUIET,
            )
