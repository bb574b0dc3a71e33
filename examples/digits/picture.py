"""Draws a training: loss and accuracy over steps, from the files that the Estimator has written."""

from __future__ import annotations

import pathlib

from npu_bridge.npu_init import tf
from npu_bridge.reporting import History, format_summary, smooth, summarize
from npu_bridge.reporting.picture_style import INK, QUIET, style_axis

_TRAINING, _HELD_OUT = "#1f6feb", "#0f8a72"


def draw(history: History, model_dir: str) -> pathlib.Path:
    """Draws the training in `model_dir` into the file `curves.svg` there, and marks restarts; returns the path."""
    # The object interface of matplotlib: no global state and no window system.
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.8), facecolor="white", layout="constrained")
    FigureCanvasSVG(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1.6, 1])

    steps, losses = [row.step for row in history.rows], [row.loss for row in history.rows]
    above.plot(steps, losses, color=_TRAINING, alpha=0.22, linewidth=1)
    above.plot(steps, smooth(losses, len(losses) // 40), color=_TRAINING, linewidth=2.2, label="training")
    above.plot(*zip(*evaluations(model_dir, "loss")), "o-", color=_HELD_OUT, markersize=4, label="held out")
    above.set(ylabel="loss", yscale="log")
    above.legend(loc="upper right", frameon=False, labelcolor=INK)

    accuracies = evaluations(model_dir, "accuracy")
    below.plot(*zip(*accuracies), "o-", color=_HELD_OUT, markersize=4)
    below.set(xlabel="step", ylabel="held out, right")
    below.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")

    for axis in (above, below):
        style_axis(axis)
        for start in history.starts[1:]:
            axis.axvline(start.step, color=QUIET, linewidth=1, linestyle=(0, (4, 3)))
    title = f"Handwritten digits: {accuracies[-1][1]:.1%} of those never seen are read right"
    above.set_title(title, loc="left", pad=24, fontsize=13, fontweight="bold", color=INK)
    above.text(0, 1.04, format_summary(summarize(history)), transform=above.transAxes, fontsize=10, color=QUIET)
    path = pathlib.Path(model_dir) / "curves.svg"
    figure.savefig(path, metadata={"Date": None})
    return path


def evaluations(model_dir: str, metric: str) -> list[tuple[int, float]]:
    """Returns a metric of all the Estimator's evaluations so far: pairs of step and value, in order of steps."""
    found = {}
    for path in sorted(pathlib.Path(model_dir, "eval").glob("events.*")):
        for event in tf.train.summary_iterator(str(path)):
            for value in event.summary.value:
                if value.tag == metric:
                    found[event.step] = value.simple_value
    return sorted(found.items())
