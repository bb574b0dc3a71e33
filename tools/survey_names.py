#!/usr/bin/env python3
"""Counts public training scripts that find every name they use from TensorFlow, Keras and this project.

    git clone https://github.com/Ascend/ModelZoo-TensorFlow
    python tools/survey_names.py ModelZoo-TensorFlow

Reads every Python file of a checkout that imports TensorFlow, Keras, `npu_bridge` or `npu_device`, without running it,
and looks up each imported module and each dotted name as a script started with `npu-run` would. A file counts if all
of its names are found, either as a TensorFlow 1 script or as a TensorFlow 2 script. Optional names (`try: ... except
ImportError`) do not count against it, nor do names of its own tree. Files that Python 3 cannot read are listed
separately.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import sys

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from tensorflow1_compat.lookup import look_up  # noqa: E402
from tensorflow1_compat.reading import read_file  # noqa: E402

ROOTS = ("tensorflow", "keras", "npu_bridge", "npu_device", "tf_slim", "hccl")


def survey(place: pathlib.Path) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Returns a dict from file to its names (name -> first line), and the files that Python 3 cannot read."""
    files: dict[str, dict[str, int]] = {}
    unreadable = []
    paths = sorted(path for path in place.rglob("*.py") if path.is_file())
    own = {path.parent if path.name == "__init__.py" else path.with_suffix("") for path in paths}
    for path in paths:
        if not any(root.encode() in path.read_bytes() for root in ROOTS):
            continue
        facts, name = read_file(str(path)), str(path.relative_to(place))
        local = {root for root in ROOTS for folder in path.parents if folder / root in own}
        names: dict[str, int] = {}
        for use in facts.uses:
            root = use.name.partition(".")[0]
            if root in ROOTS and root not in local and not use.is_guarded:
                names.setdefault(use.name, use.place.line)
        if facts.error is not None:
            unreadable.append(name)
        elif names:
            files[name] = names
    return files, unreadable


def find_missing(names: dict[str, int]) -> list[str]:
    """Returns the names of a file that are not found under the version of TensorFlow that misses fewer of them."""
    return min(([name for name in names if look_up(name, era).missing] for era in (1, 2)), key=len)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("place", type=pathlib.Path, help="a checkout, or any folder")
    parser.add_argument("--top", type=int, default=40, help="number of missing names to list (default: %(default)s)")
    parser.add_argument("--json", type=pathlib.Path, help="file for the missing names of each file")
    arguments = parser.parse_args()

    files, unreadable = survey(arguments.place)
    missing = {path: found for path, names in files.items() if (found := find_missing(names))}
    print(f"{len(files)} files, {len(unreadable)} more that Python 3 cannot read")
    for title, chosen in (("all files", list(files)), ("files that train", [p for p in files if trains(files[p])])):
        found = sum(path not in missing for path in chosen)
        print(f"{title}: {found} of {len(chosen)} find all of their names ({100 * found / max(1, len(chosen)):.2f} %)")
    counts = collections.Counter(name for names in missing.values() for name in names)
    for name, count in counts.most_common(arguments.top):
        print(f"{count:6}  {name}")
    if arguments.json:
        arguments.json.write_text(json.dumps(missing, indent=1, sort_keys=True))
    return 0


def trains(names: dict[str, int]) -> bool:
    """Returns whether a file makes an optimizer, an estimator or its own training loop."""
    return any(word in name for name in names for word in ("Optimizer", "optimizers.", ".gradients", "Estimator"))


if __name__ == "__main__":
    sys.exit(main())
