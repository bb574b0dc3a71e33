"""Trains a small BERT on two ranks, sending all gradient values or only the largest 1 %, and draws the losses of both.

    python examples/stages/loss_curves.py --picture FILE [--seeds 1,2,3] [--steps 300] [--folder out/loss_curves]

Every training resumes where it stopped, so the command can be interrupted and repeated.
"""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import sys

from npu_bridge.reporting import History, smooth
from npu_bridge.reporting.picture_style import INK, QUIET, style_axis

HERE = pathlib.Path(__file__).resolve().parent
TRAIN = HERE.parent / "bert_pretrain" / "train.py"
KINDS = {"all values": [], "largest 1 %, error feedback": ["--stages", HERE / "top_k.toml"]}
COLORS = {"all values": "#0f8a72", "largest 1 %, error feedback": "#1f6feb"}


def train(kind: str, seed: int, steps: int, folder: pathlib.Path) -> list[float]:
    """Trains on two ranks; returns the loss of each step on rank 0's part of the batch."""
    place = folder / f"{'sparse' if KINDS[kind] else 'dense'}_{seed}"
    words = [TRAIN, "--distributed", "--output_dir", place, "--num_train_steps", steps, "--seed", seed]
    words += ["--num_eval_batches", 0, "--config", "configs/bert_tiny.toml", *KINDS[kind]]
    launch = [sys.executable, "-m", "npu_bridge.run", "-np", "2"]
    subprocess.run([*launch, *map(str, words)], check=True, stdout=subprocess.DEVNULL)
    return [row.loss for row in History(place / "history.jsonl").rows]


def draw(losses: dict[str, list[list[float]]], path: str) -> None:
    """Draws the losses over steps into an SVG file: each training thin, the mean of the trainings of a kind thick.

    Args:
      losses: dict from kind of training to a list, with the losses of one training for each seed.
      path: path of the picture.
    """
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.6), facecolor="white", layout="constrained")
    FigureCanvasSVG(figure)
    axis = figure.subplots()
    ends = []
    for kind, of_seeds in losses.items():
        trends = [smooth(values, max(1, len(values) // 30)) for values in of_seeds]
        steps = range(1, min(map(len, trends)) + 1)
        for trend in trends:
            axis.plot(range(1, len(trend) + 1), trend, color=COLORS[kind], alpha=0.35, linewidth=1)
        mean = [sum(values) / len(values) for values in zip(*trends)]
        axis.plot(steps, mean, color=COLORS[kind], linewidth=2.4, label=kind)
        ends.append(f"{kind}: {mean[-1]:.2f}")
    style_axis(axis)
    axis.set(xlabel="step", ylabel="loss")
    axis.legend(loc="upper right", frameon=False, labelcolor=INK)
    title = "The same steps with all values on the wire and with 1 %"
    axis.set_title(title, loc="left", pad=24, fontsize=13, fontweight="bold", color=INK)
    said = f"small BERT, 2 ranks, {len(next(iter(losses.values())))} seeds; loss in the end: {', '.join(ends)}"
    axis.text(0, 1.03, said, transform=axis.transAxes, fontsize=10, color=QUIET)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--picture", required=True, metavar="FILE", help="SVG to write")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--folder", default="out/loss_curves", help="of the trainings")
    options = parser.parse_args()
    seeds, folder = [int(seed) for seed in options.seeds.split(",")], pathlib.Path(options.folder)
    draw({kind: [train(kind, seed, options.steps, folder) for seed in seeds] for kind in KINDS}, options.picture)


if __name__ == "__main__":
    main()
