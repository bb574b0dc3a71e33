"""The same mathematics with any number of ranks: faces x models x seeds, each against an undisturbed training.

    make test-elastic                                   # all of it; TF=2.21 for Keras 3 as well
    python -m tests.npu_run.elastic_matrix --face loop --model bert --seed 1 --seed 2

Each training begins with 4 ranks. One is killed, then another one, 2 continue, then there are 4 again. The other one
has 1 rank. Compared are the loss of every update and the weights of the end. Of each update, the rows that the model
got are looked at: every row comes once an epoch.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import pathlib
import re
import sys
import tempfile
from typing import NamedTuple

import numpy as np

from npu_bridge.base.tf_internals.names import KERAS
from tests.npu_run.elastic_scripts import QUICK
from tests.npu_run.launching import finish, start

SCRIPT = pathlib.Path(__file__).with_name("elastic_training.py")
FACES = ("estimator", "session", "monitored", "keras", "loop")
FACES_OF_KERAS3 = ("keras3", "loop3") if KERAS != "keras" else ()
MODELS = ("digits", "bert")
BOUND = 1e-5
WITHOUT_EFFECT = re.compile(r"key.*bias")  # a softmax does not notice it: its gradient is zero but for rounding
LIMIT_SECS = 900.0


class Outcome(NamedTuple):
    """The results of a training.

    Attributes:
      weights: by name.
      losses: of each update, the mean of its micro-batches.
      rows: of each update, in the order of its micro-batches.
      sizes: with how many ranks it was started, one after the other.
    """

    weights: dict[str, np.ndarray]
    losses: np.ndarray
    rows: np.ndarray
    sizes: tuple[int, ...]


class Difference(NamedTuple):
    """The worst ones: of losses as shares of the loss, of weights as shares of a variable's largest number."""

    of_losses: float
    of_weights: float

    def __str__(self):
        return f"losses {self.of_losses:.1e}, weights {self.of_weights:.1e}"


def train(place: pathlib.Path, face: str, model: str, seed: int, steps: int, ranks: int | None = None) -> Outcome:
    """Trains in a new folder.

    Args:
      ranks: how many, to the end; None for 4, 3, 2 and 4 again.
    Raises:
      RuntimeError: it has not ended well.
    """
    place.mkdir()
    options, faults = ("-np", ranks), ()
    if ranks is None:
        (place / "slots").write_text("localhost:4")
        options = ("--min-np", 2, "--max-np", 4, "--hosts-from", "cat slots", "--cool-down", 1000)
        faults = (f"3:{steps * 3 // 10}:9", f"0:{steps * 11 // 20}:9", f"0:{steps * 7 // 10}:0")
    command = (*options, "--tf2", SCRIPT, face, model, seed, "out", steps, *faults)
    with contextlib.redirect_stdout(io.StringIO()):  # the matrix alone is to be seen
        code, output = finish(start(*command, cwd=place, prepare=QUICK), LIMIT_SECS)
    if code:
        raise RuntimeError(f"{face}, {model}, seed {seed}: exit code {code}\n{output}")
    sizes = re.findall(r"npu-run: (\d) ranks? on localhost", output) if ranks is None else [ranks]
    with np.load(place / "out.npz") as weights:
        return Outcome(dict(weights), *read_notes(place), tuple(map(int, sizes)))


def read_notes(place: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    """Returns losses and rows by update; an update repeated after a rank was lost counts with its last values."""
    found: dict[tuple[int, int], list] = {}
    for file in sorted(place.glob("out.notes.*"), key=lambda path: path.stat().st_mtime):
        for line in file.read_text().splitlines():
            update, micro, *rest = json.loads(line)
            found[update, micro] = rest
    updates, micros = (max(each) + 1 for each in zip(*found))
    rest = [[found[update, micro] for micro in range(micros)] for update in range(updates)]
    losses = np.array([[each[0] for each in row] for row in rest])
    return losses.mean(axis=1), np.array([[each[1:] for each in row] for row in rest]).reshape(updates, -1)


def check_rows(rows: np.ndarray) -> int:
    """Sees that every row comes once an epoch; gives how many epochs these are, the last one in part.

    Raises:
      AssertionError: one comes twice, or not.
    """
    seen = rows.reshape(-1)
    count = seen.max() + 1
    for start_of_epoch in range(0, len(seen), count):
        epoch = seen[start_of_epoch : start_of_epoch + count]
        assert len(set(epoch)) == len(epoch), "a row came twice in an epoch"
    return -(-len(seen) // count)


def compare(found: Outcome, expected: Outcome) -> Difference:
    """The worst differences of two trainings on the same rows.

    Raises:
      AssertionError: they have other rows or other weights.
    """
    np.testing.assert_array_equal(found.rows, expected.rows)
    assert set(found.weights) == set(expected.weights)
    worst = 0.0
    for name, value in expected.weights.items():
        apart, largest = np.max(np.abs(found.weights[name] - value)), np.max(np.abs(value))
        if not WITHOUT_EFFECT.search(name):
            worst = max(worst, float(apart / max(largest, 1e-3)))
    return Difference(float(np.max(np.abs(found.losses / expected.losses - 1))), worst)


def measure(place: pathlib.Path, face: str, model: str, seed: int, steps: int, orders: bool = False) -> str:
    """A line of the matrix; arguments as of `train`.

    Args:
      place: a folder that is there.
      orders: whether it also says how far apart two undisturbed trainings are that add up in another order.
    Raises:
      AssertionError: it is not as it should be.
    """
    what = (face, model, seed, steps)
    expected, found = train(place / "whole", *what, ranks=1), train(place / "elastic", *what)
    epochs, worst = check_rows(found.rows), compare(found, expected)
    line = f"{face:9} {model:6} seed {seed}: {worst}; ranks {' '.join(map(str, found.sizes))}; "
    line += f"{len(found.rows)} updates, each row once in each of {epochs} epochs"
    if orders:
        line += f"; 3 ranks to the end: {compare(train(place / 'order', *what, ranks=3), expected)}"
    assert found.sizes == (4, 3, 2, 4), line
    assert max(worst) <= BOUND, line
    return line


def main() -> None:
    """Prints the matrix; the exit code is 1 if a part of it is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    faces = (*FACES, *FACES_OF_KERAS3)
    parser.add_argument("--face", action="append", choices=faces)
    parser.add_argument("--model", action="append", choices=MODELS)
    parser.add_argument("--seed", action="append", type=int)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--orders", action="store_true", help="also 3 undisturbed ranks: sums in another order")
    flags = parser.parse_args()
    has_failed = False
    for seed, model, face in itertools.product(flags.seed or range(4), flags.model or MODELS, flags.face or faces):
        with tempfile.TemporaryDirectory() as folder:
            try:
                line = measure(pathlib.Path(folder), face, model, seed, flags.steps, flags.orders)
            except (AssertionError, RuntimeError) as error:
                has_failed, line = True, f"FAILED: {error}"
        print(line, flush=True)
    sys.exit(has_failed)


if __name__ == "__main__":
    main()
