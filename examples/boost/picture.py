"""Draws two trainings: the loss over batches, and the share of the weights that each update trained."""

from __future__ import annotations

import pathlib

import numpy as np

from npu_bridge.reporting import smooth
from npu_bridge.reporting.picture_style import INK, QUIET, style_axis

_PLAIN, _BOOSTED = "#8b949e", "#1f6feb"


def draw(plain, boosted, path: str) -> pathlib.Path:
    """Draws two runs into an SVG file; returns the path of the file."""
    # The object interface of matplotlib: no global state and no window system.
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.8), facecolor="white", layout="constrained")
    FigureCanvasSVG(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2.4, 1])
    for run, color, name in ((plain, _PLAIN, "plain"), (boosted, _BOOSTED, "boosted")):
        batches = np.arange(1, len(run.losses) + 1)
        above.plot(batches, run.losses, color=color, alpha=0.22, linewidth=1)
        above.plot(batches, smooth(run.losses, len(run.losses) // 40), color=color, linewidth=2.2, label=name)
    above.set(ylabel="loss", ylim=(0, None))
    above.legend(loc="upper right", frameon=False, labelcolor=INK)
    batches, shares = zip(*boosted.trained)
    below.bar(batches, [100 * share for share in shares], width=1.4, color=_BOOSTED, linewidth=0)
    below.set(xlabel="batch", ylabel="weights trained (%)", ylim=(0, 105))
    for axis in (above, below):
        style_axis(axis)
    work = sum(share for _, share in boosted.trained) / len(boosted.losses)
    full = sum(share == 1 for share in shares) / len(shares)
    title = f"Boosted: {work:.0%} of the weight updates of plain training"
    above.set_title(title, loc="left", pad=24, fontsize=13, fontweight="bold", color=INK)
    said = f"{full:.0%} of {len(shares)} updates train all layers; accuracy: plain {plain.accuracy:.1%}, boosted "
    above.text(0, 1.04, f"{said}{boosted.accuracy:.1%}", transform=above.transAxes, fontsize=10, color=QUIET)
    figure.savefig(path, metadata={"Date": None})
    return pathlib.Path(path)
