#!/usr/bin/env python3
"""Draws projects at random from a folder of public training scripts, and says what each of them wants.

    python tools/draw.py 20 --seed 20261125 ModelZoo-TensorFlow

A project is the first folder on the way down that is named "... for TensorFlow", or that has a README, a licence or a
Python file. It counts if one of its Python files trains.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import random
import re
from collections.abc import Iterator

_OF_A_PROJECT = re.compile(r"readme|licen[cs]e|requirements|.*\.py$", re.IGNORECASE)
_NAMED = re.compile(r"_for_tensorflow", re.IGNORECASE)
_TRAINS = re.compile(r"\.(minimize|apply_gradients|fit|fit_generator|train_and_evaluate)\(|[Ee]stimator\.train\(")
_USES_TENSORFLOW = re.compile(r"^\s*(?:import|from) (?:tensorflow|keras|npu_bridge|npu_device)", re.MULTILINE)


def projects(place: pathlib.Path, tops: tuple[str, ...]) -> Iterator[pathlib.Path]:
    """Projects below some folders of a place that have a file which trains, as paths from the place."""
    for top in tops:
        for folder, inner, files in os.walk(place / top):
            inner.sort()
            is_project = _NAMED.search(os.path.basename(folder)) or any(map(_OF_A_PROJECT.match, files))
            if is_project and pathlib.Path(folder) != place / top:
                inner.clear()
                if any(trains(path) for path in pathlib.Path(folder).rglob("*.py")):
                    yield pathlib.Path(folder).relative_to(place)


def trains(path: pathlib.Path) -> bool:
    """Whether a file uses TensorFlow and calls what trains."""
    text = path.read_text(errors="replace")
    return bool(_TRAINS.search(text) and _USES_TENSORFLOW.search(text))


def draw(place: pathlib.Path, tops: tuple[str, ...], count: int, seed: int) -> list[pathlib.Path]:
    """So many projects; the same ones for the same seed and place."""
    return sorted(random.Random(seed).sample(sorted(projects(place, tops)), count))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, help="how many projects")
    parser.add_argument("place", type=pathlib.Path, help="folder of projects")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--top", action="append", help="a folder of it to draw from (may be given several times)")
    given = parser.parse_args()
    for project in draw(given.place, tuple(given.top or ["TensorFlow", "TensorFlow2"]), given.count, given.seed):
        print(project)


if __name__ == "__main__":
    main()
