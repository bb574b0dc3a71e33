#!/usr/bin/env python3
"""Draws projects at random from a folder of public scripts, prints their needs, and runs those with a recipe.

    python tools/draw.py 20 --seed 20261125 ModelZoo-TensorFlow
    python tools/draw.py 20 --seed 20261125 ModelZoo-TensorFlow --recipes recipes --out drawn

A project is a folder that is named "... for TensorFlow", or has a README, a licence or a Python file; projects inside
a project are a part of it. A project counts if one of its Python files trains.

Without recipes, it prints a project's needs: the files that train, the flags and files of its data, the features of its
TFRecords, and the findings of `npu-run check`. A recipe is a TOML file named as the project's folder:

    script = "train.py"                    # from `folder`
    folder = "src"                         # where it is started, from the project; "." if left out
    args = ["--data_dir={data}", "--model_dir={out}"]
    data = "made_up.py"                    # beside the recipe: a script whose one argument is the folder {data}
    features = ["train.tfrecord"]          # files for {data}, made of the features that the project reads
    setup = ["mkdir -p output"]            # shell lines, in `folder`
    ranks = [1, 2]                         # [1] if left out
    environment = { NAME = "value" }

The project is copied, and its Python files are not changed. With `--out` each script runs for `--secs` at most, and
`table.md` shows for each: the number of ranks, whether three or more losses were printed that are all finite, the first
and the last loss, or else the last line of the error.
"""

from __future__ import annotations

import argparse
import ast
import math
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

try:
    import tomllib
except ModuleNotFoundError:
    import tomli as tomllib

_OF_A_PROJECT = re.compile(r"readme|licen[cs]e|requirements|.*\.py$", re.IGNORECASE)
_NAMED = re.compile(r"_for_tensorflow", re.IGNORECASE)
_TRAINS = re.compile(r"\.(minimize|apply_gradients|fit|fit_generator|train_and_evaluate)\(|[Ee]stimator\.train\(")
_USES_TENSORFLOW = re.compile(r"^\s*(?:import|from) (?:tensorflow|keras|npu_bridge|npu_device)", re.MULTILINE)
_OF_DATA = re.compile(r"data|path|dir|file|record|vocab|ckpt|pretrain|weight", re.IGNORECASE)
_LOSS = re.compile(r"loss\w*\W{1,12}(?:\w+\()?([-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|nan|inf))", re.IGNORECASE)
_FEATURES = ("FixedLenFeature", "VarLenFeature", "FixedLenSequenceFeature")
_FEW = 3  # losses
_LENGTH = 8  # of a feature with a computed shape


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


class DataNeeds(ast.NodeVisitor):
    """A visitor that collects, from a file's syntax tree, the names and shapes of the data that the file reads.

    Attributes:
      flags: name -> default of flags and arguments whose names suggest data.
      features: name -> (kind, shape, dtype) of features read from a TFRecord; unknown numbers are `_LENGTH`.
    """

    def __init__(self) -> None:
        self.flags: dict[str, Any] = {}
        self.features: dict[str, tuple[str, list[int], str]] = {}

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        texts = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        if texts and name.lower().startswith(("define_", "add_argument")) and _OF_DATA.search(texts[0]):
            defaults = [each.value for each in node.keywords if each.arg == "default"] or node.args[1:2]
            self.flags[texts[0].lstrip("-")] = ast.unparse(defaults[0]) if defaults else None
        self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        for key, value in zip(node.keys, node.values):
            self._note(key, value)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            if isinstance(target, ast.Subscript):
                self._note(target.slice, node.value)
        self.generic_visit(node)

    def _note(self, key: ast.AST | None, value: ast.AST) -> None:
        kind = value.func.attr if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) else ""
        if kind in _FEATURES and isinstance(key, ast.Constant):
            given = [ast.unparse(each) for each in (*value.args, *(each.value for each in value.keywords))]
            dtype = next((kind for kind in ("int64", "float32", "string") if any(kind in text for text in given)), "")
            lengths = re.findall(r"\w+", given[0]) if kind == "FixedLenFeature" else [str(_LENGTH)]
            shape = [int(length) if length.isdigit() else _LENGTH for length in lengths]
            self.features[str(key.value)] = (kind, shape, dtype or "string")


def data_needs_of(project: pathlib.Path) -> DataNeeds:
    """Collects the `DataNeeds` of all files of a project in one object."""
    needs = DataNeeds()
    for path in sorted(project.rglob("*.py")):
        try:
            needs.visit(ast.parse(path.read_bytes()))
        except (SyntaxError, ValueError, RecursionError):
            continue  # for Python 2
    return needs


def make_records(path: pathlib.Path, features: dict[str, tuple[str, list[int], str]], count: int = 64) -> None:
    """Writes a TFRecord file with random numbers."""
    import tensorflow as tf

    drawn = random.Random(0)
    make = {
        "int64": lambda n: tf.train.Feature(int64_list={"value": [drawn.randrange(2) for _ in range(n)]}),
        "float32": lambda n: tf.train.Feature(float_list={"value": [drawn.gauss(0, 1) for _ in range(n)]}),
        "string": lambda n: tf.train.Feature(bytes_list={"value": [drawn.randbytes(8) for _ in range(n)]}),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with tf.io.TFRecordWriter(str(path)) as writer:
        for _ in range(count):
            feature = {name: make[dtype](math.prod(shape)) for name, (_, shape, dtype) in features.items()}
            writer.write(tf.train.Example(features={"feature": feature}).SerializeToString())


def npu_run(*words: str) -> list[str]:
    """Returns the command that starts `npu-run` with this interpreter."""
    return [sys.executable, "-m", "npu_bridge.run", *words]


def describe(place: pathlib.Path, project: pathlib.Path) -> None:
    """Prints a project's needs."""
    needs = data_needs_of(place / project)
    print(project)
    for path in training_files(place / project):
        done = subprocess.run([*npu_run("check"), path], capture_output=True, text=True, check=False)
        stops = [line.strip() for line in done.stdout.splitlines() if "stops it" in line]
        print(f"  {path.relative_to(place / project)}: {'clean' if not done.returncode else '; '.join(stops)[:300]}")
    for name, default in needs.flags.items():
        print(f"  flag {name}, by default {default}")
    for name, (kind, shape, dtype) in needs.features.items():
        print(f"  feature {name}: {kind} of {dtype}, {shape}")


def run(place: pathlib.Path, project: pathlib.Path, recipes: pathlib.Path, out: pathlib.Path, secs: int) -> list[str]:
    """Runs a project by its recipe; returns its rows of the table."""
    recipe_file = recipes / f"{project.name}.toml"
    if not recipe_file.exists():
        return [f"| {project} | | no recipe | | |"]
    recipe = tomllib.loads(recipe_file.read_text())
    rows = []
    for ranks in recipe.get("ranks", [1]):
        base = out / f"{project.name}-{ranks}"
        shutil.rmtree(base, ignore_errors=True)
        shutil.copytree(place / project, base / "project", symlinks=True)
        folder, names = base / "project" / recipe.get("folder", "."), {"data": base / "data", "out": base / "out"}
        for path in names.values():
            path.mkdir()
        if "data" in recipe:
            subprocess.run([sys.executable, recipes / recipe["data"], names["data"]], check=True)
        for name in recipe.get("features", []):
            make_records(names["data"] / name, data_needs_of(place / project).features)
        for line in recipe.get("setup", []):
            subprocess.run(line.format(**names), shell=True, check=True, cwd=folder)
        words = [word.format(**names) for word in recipe.get("args", [])]
        environment = {name: text.format(**names) for name, text in recipe.get("environment", {}).items()}
        command = npu_run("-np", str(ranks), recipe["script"], *words)
        with open(base / "log.txt", "w+", encoding="utf-8", errors="replace") as log:
            outputs = {"stdout": log, "stderr": subprocess.STDOUT, "env": {**os.environ, **environment}}
            process = subprocess.Popen(command, cwd=folder, **outputs)
            try:
                code = process.wait(secs)
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait()
                code = None
        rows.append(_row(project, recipe["script"], ranks, (base / "log.txt").read_text(errors="replace"), code))
    return rows


def _row(project: pathlib.Path, script: str, ranks: int, text: str, code: int | None) -> str:
    losses = [float(found) for found in _LOSS.findall(text)]
    trains = len(losses) >= _FEW and all(map(math.isfinite, losses)) and not code
    last = next((line for line in reversed(text.splitlines()) if line.strip()), "")
    shown = f"{losses[0]:.4g} to {losses[-1]:.4g}" if losses else ""
    cause = "" if trains else last.replace("|", "/")[:160]
    return f"| {project} | {script} | {ranks} | {'trains' if trains else 'does not'} | {shown} | {cause} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, help="how many projects")
    parser.add_argument("place", type=pathlib.Path, help="folder of projects")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--top", action="append", help="a folder of it to draw from (may be given several times)")
    parser.add_argument("--recipes", type=pathlib.Path, help="folder of recipes")
    parser.add_argument("--out", type=pathlib.Path, help="folder for copies, logs and table.md")
    parser.add_argument("--secs", type=int, default=300, help="seconds for one run")
    given = parser.parse_args()
    place = given.place.resolve()
    drawn = draw(place, tuple(given.top or ["TensorFlow", "TensorFlow2"]), given.count, given.seed)
    if given.recipes is None or given.out is None:
        for project in drawn:
            describe(place, project)
        return
    given.out.mkdir(parents=True, exist_ok=True)
    with open(given.out / "table.md", "w", encoding="utf-8") as table:
        table.write("| project | script | ranks | | losses | cause |\n| --- | --- | --- | --- | --- | --- |\n")
        for project in drawn:
            for row in run(place, project, given.recipes.resolve(), given.out.resolve(), given.secs):
                table.write(row + "\n")
                table.flush()
                print(row)


if __name__ == "__main__":
    main()
