"""Records how a script of TensorFlow 1 trains here, replays it under TensorFlow 1.15 and compares the two.

    .venv/bin/python tools/replay_on_genuine.py [--steps 10] [--out DIR] [--path DIR] [--copy] train.py --batch 32

Prints the largest relative differences of losses, trained weights and optimizer slots; above the tolerance, also the
first operator that differs in a step although its inputs agree. `{out}` in the script's arguments becomes a folder of
each run. The exit code is 0 if everything agrees, 1 if not, and 2 if the script could not be recorded or replayed.
`make venv-tf115` installs TensorFlow 1.15.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import shutil
import subprocess
import sys
from typing import NamedTuple

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
REPLAY = ROOT / "tests/tensorflow1_compat/stand_in/replay.py"
GENUINE = ROOT / ".venv-tf115/bin/python"
_NOTHING = 1e-6  # of the largest value; rounding errors of sums in float32 are below it


class Difference(NamedTuple):
    """The largest difference between two trainings in one kind of values, and the place of this difference.

    Attributes:
      kind: "loss", "weights" or "slots".
      relative: the largest difference of an array, as a share of the largest number in it.
      where: step or variable.
      beyond: arrays whose difference exceeds the tolerance.
      count: number of compared arrays.
    """

    kind: str
    relative: float
    where: str
    beyond: list[str]
    count: int


def main(arguments: list[str]) -> int:
    """Records, replays and compares; returns the exit code."""
    given = _parse(arguments)
    out = pathlib.Path(given.out).absolute()
    out.mkdir(parents=True, exist_ok=True)
    try:
        found = replay(given, out, [])
        for each in found:
            beyond = f"; {len(each.beyond)} beyond: {', '.join(each.beyond[:6])}" if each.beyond else ""
            print(f"{each.kind}: {each.relative:.2g} at {each.where} ({each.count} compared{beyond})", flush=True)
        if all(each.relative <= given.tolerance for each in found):
            print(f"{given.script}: agrees over {given.steps} steps, within {given.tolerance:g}")
            return 0
        replay(given, out, ["--tensors"])
    except RuntimeError as error:
        print(f"{given.script}: {error}")
        return 2
    print(f"{given.script}: differs; {first_operator(out, given.tolerance)}")
    return 1


def _parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", default="out/genuine", help="folder for the record and the replay")
    parser.add_argument("--python", default=str(GENUINE), help="the interpreter of TensorFlow 1.15")
    parser.add_argument("--path", action="append", default=[], help="folder with other packages for Python 3.7")
    parser.add_argument("--copy", action="store_true", help="run in copies of the working folder or package")
    parser.add_argument("--tolerance", type=float, default=1e-5)
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser.parse_args(arguments)


def replay(given: argparse.Namespace, out: pathlib.Path, options: list[str]) -> list[Difference]:
    """Records and replays a script; raises `RuntimeError` with the end of its output if that fails."""
    recorded, replayed = out / "recorded", out / "replayed"
    # Both compute with kernels that exist in both.
    env = {**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0", "TF_CPP_MIN_LOG_LEVEL": "2", "TF2_BEHAVIOR": "0"}
    here = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    record = [sys.executable, "-m", "npu_bridge.run", "record", "--tf1", "--float32", "--steps", str(given.steps)]
    own = [
        str(out / "here") if each == "{out}" else each.replace("{out}", str(out / "here")) for each in given.arguments
    ]
    record += [*options, "-o", str(recorded), given.script, *own]
    _run(record, out / "record.log", {**env, "PYTHONPATH": here}, _folder(given, out))
    for old in replayed.glob("*"):
        old.unlink()
    there = os.pathsep.join([*given.path, *filter(None, [env.get("PYTHONPATH")])])
    own = [each.replace("{out}", str(out / "there")) for each in given.arguments]
    command = [given.python, str(REPLAY), str(recorded), str(replayed), given.script, *own]
    _run(command, out / "replay.log", {**env, "PYTHONPATH": there}, _folder(given, out))
    if not (replayed / "replayed.json").exists():
        raise RuntimeError(f"it trained fewer steps under TensorFlow 1.15 than were recorded; see {out / 'replay.log'}")
    return compare(recorded / "rank_0", replayed, given.tolerance)


def _folder(given, out):
    """Returns the folder in which the script is started."""
    if not given.copy:
        return "."
    shutil.rmtree(out / "folder", ignore_errors=True)
    ignore, here = functools.partial(_ignore_out_folder, out), pathlib.Path.cwd()
    top = here
    while (top / "__init__.py").exists() and (top.parent / "__init__.py").exists():
        top = top.parent  # a script inside a package imports from all of it
    copy = out / "folder" / top.name
    shutil.copytree(top, copy, symlinks=True, ignore=ignore)
    return copy / here.relative_to(top)


def _ignore_out_folder(folder, where, names):
    return [name for name in names if pathlib.Path(where, name).absolute() == folder]


def _run(command, log, env, folder):
    with open(log, "wb") as file:
        code = subprocess.run(
            command, stdout=file, stderr=subprocess.STDOUT, env=env, cwd=folder, check=False
        ).returncode
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    for line in lines:
        if line.startswith(("record: not re", "replay: this graph")):
            print(line)
    if code:
        raise RuntimeError(f"{command[0]} ended with exit code {code}: {lines[-1] if lines else ''} ({log})")


def compare(recorded: pathlib.Path, replayed: pathlib.Path, tolerance: float) -> list[Difference]:
    """Compares losses, trained weights and slots of two trainings."""
    facts, there = (json.loads(path.read_text()) for path in (recorded / "record.json", replayed / "replayed.json"))
    if there["drawn"]:
        print(f"drawn, not replayed: {', '.join(there['drawn'])}")
    pairs = zip(facts["losses"], there["losses"])
    losses = {f"step {step}": pair for step, pair in enumerate(pairs) if None not in pair}
    before, ours = (np.load(recorded / name) for name in ("weights.npz", "weights_after.npz"))
    genuine = np.load(replayed / "weights_after.npz")
    both = [name for name in ours.files if name in genuine.files and ours[name].dtype.kind == "f"]
    changed = [name for name in both if not np.array_equal(before[name], ours[name])]
    still = without_gradient(facts["trained"], {name: ours[name] for name in changed})
    if still:
        print(f"moved by rounding alone, not compared: {', '.join(still)}")
    changed = [name for name in changed if not any(variable in name for variable in still)]
    kinds = {"loss": losses, "weights": {}, "slots": {}}
    for name in changed:
        kinds["weights" if name in facts["trained"] else "slots"][name] = (ours[name], genuine[name])
    missing = sorted(set(ours.files) - set(genuine.files))
    if missing:
        print(f"not there: {', '.join(missing)}")
    if not any(loss is not None for loss in facts["losses"]):
        del kinds["loss"]  # the loss is not a scalar
    return [_find_largest_difference(kind, arrays, tolerance) for kind, arrays in kinds.items()]


def without_gradient(trained: list[str], values: dict[str, np.ndarray]) -> list[str]:
    """Returns trained variables whose slots are almost zero, compared with those of other variables.

    For example, the softmax of an attention cancels the bias of the keys. The gradient of this bias is only rounding
    noise, and Adam divides the noise by its own size.
    """
    kept: dict[str, dict[str, float]] = {}  # by slot and variable
    for name in set(values) - set(trained):
        for variable in sorted((each for each in trained if each in name), key=len)[-1:]:
            kept.setdefault(name.replace(variable, ""), {})[variable] = float(np.abs(values[name]).max())
    small = {
        variable: all(sizes.get(variable, 0.0) <= _NOTHING * max(sizes.values()) for sizes in kept.values())
        for variable in set().union(*kept.values())
    }
    return sorted(variable for variable, is_small in small.items() if is_small)


def _find_largest_difference(kind, arrays, tolerance):
    apart = {name: relative(*pair) for name, pair in arrays.items()}
    where = max(apart, key=lambda name: apart[name], default="nothing")
    beyond = [name for name, far in apart.items() if not far <= tolerance]
    return Difference(kind, apart.get(where, 0.0 if kind == "slots" else float("nan")), where, beyond, len(apart))


def relative(here: np.ndarray, there: np.ndarray) -> float:
    """Returns the largest difference as a share of the largest number; infinite if one number is not finite."""
    here, there = (np.asarray(each, np.float64) for each in (here, there))
    if here.shape != there.shape or not np.array_equal(np.isfinite(here), np.isfinite(there)):
        return float("inf")
    if not here.size or np.array_equal(here, there, equal_nan=True):
        return 0.0
    return float(np.nanmax(np.abs(here - there)) / np.nanmax(np.abs([here, there])))


def first_operator(out: pathlib.Path, tolerance: float) -> str:
    """Returns a sentence about the first tensor of a recorded step whose difference exceeds the tolerance."""
    types = json.loads((out / "recorded/rank_0/record.json").read_text())["types"]
    for path in sorted((out / "recorded/rank_0").glob("tensors_*.npz")):
        here, there = np.load(path), np.load(out / "replayed" / path.name)
        for name in here.files:
            # With another shape it is another operator, for example one that reduces gradients before it multiplies.
            is_same = name in there.files and here[name].shape == there[name].shape
            apart = relative(_remove_loss_scale(here, there, name), there[name]) if is_same else 0.0
            if apart > tolerance:
                return f"the first operator is {name} ({types[name]}), {apart:.2g} off in step {int(path.stem[-5:])}"
    return "no operator differs that much by itself"


def _remove_loss_scale(here, there, name):
    """Divides a gradient by the loss scale, a power of two, which TensorFlow 1.15 does not have."""
    largest = [float(np.abs(each[name]).max(initial=0)) for each in (here, there)]
    if "gradients" not in name or not all(0 < each < np.inf for each in largest):
        return here[name]
    return here[name] / 2.0 ** round(np.log2(largest[0] / largest[1]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
