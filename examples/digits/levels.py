"""Trains on handwritten digits at the levels O0 to O3: one network, the same batches, four precisions, one picture.

    python examples/digits/levels.py

Writes the loss curves to levels.svg, with the bytes of variables and slots and the time of a step in its legend.
"""

from __future__ import annotations

import argparse
import pathlib
import time
from typing import NamedTuple

import numpy as np
from digits import load

from npu_bridge import amp
from npu_bridge.reporting import smooth
from npu_bridge.reporting.picture_style import INK, QUIET, style_axis

# isort: split
import tensorflow as tf  # after npu_bridge, which hides TensorFlow's notes about its own build

_COLORS = {"O0": "#57606a", "O1": "#1f6feb", "O2": "#0f8a72", "O3": "#c2410c"}


class Training(NamedTuple):
    """The results of one level."""

    level: str
    losses: list
    accuracy: float
    kilobytes: float
    step_msecs: float
    skipped: int

    def in_words(self) -> str:
        """Returns the results for the legend."""
        return (
            f"{self.level}: {self.accuracy:.1%} right, {self.kilobytes:.0f} kB of variables and slots, "
            f"{self.step_msecs:.1f} ms a step, {self.skipped} skipped"
        )


def new_model() -> tf.keras.Model:
    """Builds a small convolutional network with batch normalisation, the same at every call."""
    tf.keras.utils.set_random_seed(1)
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            layers.Input([8, 8, 1]),
            layers.Conv2D(16, 3, strides=2, padding="same"),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Conv2D(32, 3, strides=2, padding="same"),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dense(64, "relu"),
            layers.Dense(10),
        ]
    )


class Losses(tf.keras.callbacks.Callback):
    """Notes the loss and the time of each step."""

    def on_train_begin(self, logs=None):
        self.losses, self.times, self._total = [], [], 0.0

    def on_epoch_begin(self, epoch, logs=None):
        self._total = 0.0

    def on_train_batch_begin(self, batch, logs=None):
        self._start = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self.times.append(time.perf_counter() - self._start)
        total = logs["loss"] * (batch + 1)  # Keras logs the mean of the epoch so far
        self.losses.append(total - self._total)
        self._total = total


def train(level: str, steps: int, batch_size: int) -> Training:
    """Trains the network at a level."""
    (pictures, digits), held_out = load()
    optimizer = tf.keras.optimizers.legacy.SGD(0.05, momentum=0.9)
    levels = amp.configure(level, optimizer, new_model(), is_distributed=False)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    levels.model.compile(levels.optimizer, loss, metrics=["accuracy"])
    batches = tf.data.Dataset.from_tensor_slices((pictures, digits)).shuffle(len(digits), seed=1).repeat()
    seen = Losses()
    batches = batches.batch(batch_size, drop_remainder=True).take(steps)
    levels.model.fit(batches, epochs=1, verbose=0, callbacks=[seen])
    accuracy = levels.model.evaluate(*held_out, verbose=0)[1]
    variables = {id(v): v for v in [*levels.model.variables, *levels.optimizer.variables()]}.values()
    kilobytes = sum(int(np.prod(variable.shape)) * variable.dtype.size for variable in variables) / 1000
    skipped = int(levels.optimizer.skipped_steps) if levels.loss_scale_managers else 0
    return Training(level, seen.losses, accuracy, kilobytes, 1000 * float(np.median(seen.times)), skipped)


def draw(trainings: list[Training], path: pathlib.Path) -> None:
    """Draws the loss curves of all levels into one picture."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.8), facecolor="white", layout="constrained")
    FigureCanvasSVG(figure)
    axis = figure.subplots()
    for training in trainings:
        color, steps = _COLORS[training.level], range(1, len(training.losses) + 1)
        axis.plot(steps, training.losses, color=color, alpha=0.15, linewidth=1)
        curve = smooth(training.losses, max(1, len(training.losses) // 25))
        axis.plot(steps, curve, color=color, linewidth=2, label=training.in_words())
    axis.set(xlabel="step", ylabel="loss", yscale="log")
    style_axis(axis)
    axis.legend(loc="upper right", frameon=False, labelcolor=INK, fontsize=9)
    axis.set_title("Handwritten digits at four levels", loc="left", pad=22, fontsize=13, fontweight="bold", color=INK)
    told = "the same network, first weights and batches; " + _processor()
    axis.text(0, 1.03, told, transform=axis.transAxes, fontsize=10, color=QUIET)
    figure.savefig(path, metadata={"Date": None})


def _processor() -> str:
    return "times on a GPU" if tf.config.list_physical_devices("GPU") else "times on a CPU, which is slow in 16 bits"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--levels", nargs="+", default=["O0", "O1", "O2", "O3"], choices=list(amp.LEVELS))
    parser.add_argument("--output_dir", default="out/levels")
    flags = parser.parse_args()
    trainings = []
    for level in flags.levels:
        trainings.append(train(level, flags.steps, flags.batch_size))
        print(trainings[-1].in_words(), flush=True)
    folder = pathlib.Path(flags.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    draw(trainings, folder / "levels.svg")
    print(f"picture: {folder / 'levels.svg'}")


if __name__ == "__main__":
    main()
