"""Draws a training run with matplotlib: loss above, loss scale below, overflows and restarts marked."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from npu_bridge.base.secondary_files import Secondary
from npu_bridge.reporting.history import History, StepRow, laid_out
from npu_bridge.reporting.picture_style import INK, QUIET, new_figure, tidy, write_png
from npu_bridge.reporting.progress_line import format_loss, format_steps
from npu_bridge.reporting.summary import format_summary, summarize

_LOSS = "#1f6feb"
_SCALE = "#0f8a72"
_OVERFLOW = "#d9480f"


def draw_training(history: History, path: str, title: str = "") -> None:
    """Draws a history into a PNG file.

    Args:
      history: the run; several sessions become one picture with their restarts marked.
      path: the file to write, overwritten if it exists.
      title: set above the picture. Empty: none.
    Raises:
      MissingExtraError: matplotlib is not installed.
      ValueError: the history holds no step.
    """
    rows, places, starts = laid_out(history)
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
        tidy(axis)
        _mark_restarts(axis, [places[at - 1] for at in starts if at], labelled=axis is above)
    axes[-1].set_xlabel("step" if not history.skipped_steps else "step, skipped ones included")
    above.set_title(title, loc="left", pad=24, fontsize=13, fontweight="bold", color=INK)
    above.text(0.0, 1.03, format_summary(summary), transform=above.transAxes, fontsize=10, color=QUIET)
    Secondary(f"the picture {path}").attempt(write_png, figure, path)


def smooth(values: Sequence[float], reach: int) -> np.ndarray:
    """Centred weighted mean: a value counts less the further away it is, and not at all beyond `reach`.

    It does not lag behind a falling curve. At both ends the window is cut off; values that are not finite are
    passed over, and where a window holds none that is, the result is NaN.

    Args:
      values: the raw curve.
      reach: how many neighbours on each side take part; 0 leaves the curve as it is.
    """
    raw = np.asarray(values, float)
    finite = np.isfinite(raw)
    weights = (reach + 1.0 - np.abs(np.arange(-reach, reach + 1))) / (reach + 1.0)

    def spread(signal):
        return np.convolve(signal, weights)[reach : reach + len(raw)]

    total, share = spread(np.where(finite, raw, 0.0)), spread(finite.astype(float))
    return np.divide(total, share, out=np.full(len(raw), np.nan), where=share > 1e-9)


def _draw_loss(axis, places: Sequence[int], rows: Sequence[StepRow], last_loss: float | None):
    points = [(place, row.loss) for place, row in zip(places, rows) if row.loss is not None]
    axis.set_ylabel("loss")
    if not points:
        return
    x, losses = zip(*points)
    axis.plot(x, losses, color=_LOSS, alpha=0.22, linewidth=1.0)
    axis.plot(x, smooth(losses, reach=len(losses) // 40), color=_LOSS, linewidth=2.2, solid_capstyle="round")
    finite = [loss for loss in losses if math.isfinite(loss)]
    if finite and min(finite) > 0 and max(finite) / min(finite) > 20:
        axis.set_yscale("log")
    if last_loss is not None and math.isfinite(last_loss):
        axis.annotate(
            format_loss(last_loss),
            (x[-1], last_loss),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=_LOSS,
            fontweight="bold",
            annotation_clip=False,
        )


def _draw_scale(axis, places: Sequence[int], rows: Sequence[StepRow]):
    points = [(place, row.loss_scale, row.skipped) for place, row in zip(places, rows) if row.loss_scale]
    scales = [scale for _, scale, _ in points]
    axis.step([place for place, _, _ in points], scales, where="mid", color=_SCALE, linewidth=1.8)
    axis.set_yscale("log", base=2)
    axis.set_ylabel("loss scale")
    # One power of two outside the data, so that a constant scale is a line in the middle.
    finite = [scale for scale in scales if math.isfinite(scale) and scale > 0] or [1.0]
    axis.set_ylim(2.0 ** (math.floor(math.log2(min(finite))) - 1), 2.0 ** (math.ceil(math.log2(max(finite))) + 1))
    overflows = [(place, scale) for place, scale, skipped in points if skipped]
    if overflows:
        label = f"overflow, {format_steps(len(overflows))} skipped"
        axis.scatter(*zip(*overflows), marker="v", s=34, color=_OVERFLOW, zorder=3, label=label)
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
