#!/usr/bin/env python3
"""Draws projects at random from a folder of public scripts, and lists their files that train.

    python tools/draw.py 20 --seed 20261125 ModelZoo-TensorFlow

A project is a folder that is named "... for TensorFlow", or has a README, a licence or a Python file; projects inside
a project are a part of it. A project counts if one of its Python files trains.
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
    """Yields the paths, relative to `place`, of the projects in the folders `tops` that have a file which trains."""
    for top in tops:
        for folder, inner, files in os.walk(place / top):
            inner.sort()
            is_project = _NAMED.search(os.path.basename(folder)) or any(map(_OF_A_PROJECT.match, files))
            if is_project and pathlib.Path(folder) != place / top:
                inner.clear()
                if any(training_files(pathlib.Path(folder))):
                    yield pathlib.Path(folder).relative_to(place)


def training_files(project: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a project's files that use TensorFlow and call a training."""
    for path in sorted(project.rglob("*.py")):
        text = path.read_text(errors="replace")
        if _TRAINS.search(text) and _USES_TENSORFLOW.search(text):
            yield path


def draw(place: pathlib.Path, tops: tuple[str, ...], count: int, seed: int) -> list[pathlib.Path]:
    """Draws `count` projects at random; the same seed and place give the same projects."""
    return sorted(random.Random(seed).sample(sorted(projects(place, tops)), count))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, help="how many projects")
    parser.add_argument("place", type=pathlib.Path, help="folder of projects")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--top", action="append", help="a folder of it to draw from (may be given several times)")
    given = parser.parse_args()
    place = given.place.resolve()
    for project in draw(place, tuple(given.top or ["TensorFlow", "TensorFlow2"]), given.count, given.seed):
        print(
            project, *(f"  {path.relative_to(place / project)}" for path in training_files(place / project)), sep="\n"
        )


if __name__ == "__main__":
    main()
