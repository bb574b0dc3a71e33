"""The matplotlib style of all pictures with axes."""

from __future__ import annotations

from typing import Any

from npu_bridge.reporting.errors import imported

INK = "#1f2933"
QUIET = "#8592a3"
GRID = "#e4e8ee"


def new_figure(who: str, height: float) -> Any:
    """A white figure ten inches wide, without pyplot: no global state and no window system.

    Args:
      who: wants it, for the message of a `MissingExtraError`.
      height: in inches.
    """
    figure_of = imported("matplotlib.figure", who, "plot").Figure
    return figure_of(figsize=(10, height), dpi=120, facecolor="white", layout="constrained")


def tidy(axis) -> None:
    """Gives a matplotlib axis a light grid and no frame on the top and on the right."""
    axis.grid(True, color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.margins(x=0.01)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_color(QUIET)
    axis.tick_params(colors=INK, labelsize=9)
    axis.xaxis.label.set_color(INK)
    axis.yaxis.label.set_color(INK)
