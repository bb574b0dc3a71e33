"""Draws an accelerated training: the loss over steps, and the steps that computed in low precision."""

from __future__ import annotations

import pathlib

from npu_bridge.reporting import History, smooth
from npu_bridge.reporting.picture_style import INK, QUIET, style_axis

_LOSS, _LOW, _SWITCH, _SCALE = "#1f6feb", "#f0b429", "#d9480f", "#0f8a72"


def draw(history: History, path: str, target_loss: float | None = None) -> pathlib.Path:
    """Draws a history into an SVG file; returns the path of the file.

    Args:
      history: the history of a run, with the precision of each step.
      path: the path of the picture.
      target_loss: the loss that switches the precision, drawn as a line; None if the loss does not switch it.
    """
    # The object interface of matplotlib: no global state and no window system.
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.8), facecolor="white", layout="constrained")
    FigureCanvasSVG(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2.4, 1])

    rows = history.rows
    steps, losses = [row.step for row in rows], [row.loss for row in rows]
    trend = smooth(losses, len(losses) // 40)
    above.plot(steps, losses, color=_LOSS, alpha=0.22, linewidth=1)
    above.plot(steps, trend, color=_LOSS, linewidth=2.2, label="loss")
    if target_loss is not None:
        above.axhline(target_loss, color=QUIET, linestyle=":", label=f"target {target_loss:g}")
    above.set(ylabel="loss", ylim=(0, None))
    below.step(steps, [row.loss_scale for row in rows], where="post", color=_SCALE, linewidth=1.8)
    below.set(xlabel="step", ylabel="loss scale")
    below.set_yscale("log", base=2)
    below.margins(y=0.3)

    lowered = [row for row in rows if row.precision != "float32"]
    for axis in (above, below):
        style_axis(axis)
        if lowered:
            name = lowered[0].precision if axis is above else None
            axis.axvspan(steps[0], lowered[-1].step, color=_LOW, alpha=0.2, linewidth=0, label=name)
        if lowered and len(lowered) < len(rows):
            axis.axvline(lowered[-1].step, color=_SWITCH, linewidth=1.4)
    above.legend(loc="upper right", frameon=False, labelcolor=INK)
    title, said = in_words(history, trend)
    above.set_title(title, loc="left", pad=24, fontsize=13, fontweight="bold", color=INK)
    above.text(0, 1.04, said, transform=above.transAxes, fontsize=10, color=QUIET)
    figure.savefig(path, metadata={"Date": None})
    return pathlib.Path(path)


def in_words(history: History, trend) -> tuple[str, str]:
    """Returns two texts: the picture's title, and the result of the training."""
    rows = history.rows
    lowered = [row for row in rows if row.precision != "float32"]
    if not lowered:
        return f"{len(rows)} steps in float32", ""
    share = len(lowered) / len(rows)
    title = f"{lowered[0].precision} for {share:.0%} of {len(rows)} steps"
    switch = f"float32 from step {lowered[-1].step + 1} on" if share < 1 else "no switch so far"
    return title, f"{switch}, loss {trend[0]:.3f} -> {trend[-1]:.3f}, {history.skipped_steps} steps skipped"
