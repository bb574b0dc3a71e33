"""Runs every `case_...` of this folder's modules (or of those named), each in a graph of its own; prints a JSON."""

from __future__ import annotations

import importlib
import json
import pathlib
import sys
import traceback

import tensorflow.compat.v1 as tf


def main() -> None:
    tf.disable_v2_behavior()
    failures = {}
    chosen = sys.argv[1:] or ["of_*"]
    for path in sorted(path for each in chosen for path in pathlib.Path(__file__).parent.glob(f"{each}.py")):
        module = importlib.import_module(f"tests.tensorflow1_compat.contrib_cases.{path.stem}")
        for name, case in list(vars(module).items()):
            if not name.startswith("case_"):
                continue
            try:
                with tf.Graph().as_default():
                    tf.set_random_seed(7)
                    case()
                failures[f"{path.stem}.{name}"] = None
            except Exception:
                failures[f"{path.stem}.{name}"] = traceback.format_exc()
    json.dump(failures, sys.stdout)


if __name__ == "__main__":
    main()
