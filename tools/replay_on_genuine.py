"""Records how a script of TensorFlow 1 trains here, replays it under TensorFlow 1.15 and compares the two.

    .venv/bin/python tools/replay_on_genuine.py [--steps 10] [--out DIR] [--path DIR] train.py --batch 32

Prints the largest relative difference of losses, of trained weights and of what optimizers keep beside them; where one
is above the tolerance, also the first operator that differs in a step, of those whose inputs agree. `{out}` in the
script's arguments becomes a folder of each run. The exit code is 0 where all of it agrees, 1 where not, and 2 where the
script could not be recorded or replayed. `make venv-tf115` installs TensorFlow 1.15.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
from typing import NamedTuple

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
REPLAY = ROOT / "tests/tensorflow1_compat/stand_in/replay.py"
GENUINE = ROOT / ".venv-tf115/bin/python"


class Difference(NamedTuple):
    """How far two trainings are apart, and where.

    Attributes:
      kind: "loss", "weights" or "slots".
      relative: the largest difference of an array, as a share of the largest number in it.
      where: step or variable.
      count: arrays that were compared.
    """

    kind: str
    relative: float
    where: str
    count: int


def main(arguments: list[str]) -> int:
    """Gives the exit code."""
    given = _parse(arguments)
    out = pathlib.Path(given.out).absolute()
    out.mkdir(parents=True, exist_ok=True)
    try:
        found = replay(given, out, [])
        for each in found:
            print(f"{each.kind}: {each.relative:.2g} at {each.where} ({each.count} compared)", flush=True)
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
    parser.add_argument("--python", default=str(GENUINE), help="that of TensorFlow 1.15")
    parser.add_argument("--path", action="append", default=[], help="folder with other packages for Python 3.7")
    parser.add_argument("--tolerance", type=float, default=1e-5)
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser.parse_args(arguments)


def replay(given: argparse.Namespace, out: pathlib.Path, options: list[str]) -> list[Difference]:
    """Records and replays a script; raises `RuntimeError` with the end of what it printed where that fails."""
    recorded, replayed = out / "recorded", out / "replayed"
    # Both compute with the kernels that both have.
    env = {**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0", "TF_CPP_MIN_LOG_LEVEL": "2"}
    here = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    record = [sys.executable, "-m", "npu_bridge.run", "record", "--tf1", "--float32", "--steps", str(given.steps)]
    own = [
        str(out / "here") if each == "{out}" else each.replace("{out}", str(out / "here")) for each in given.arguments
    ]
    _run([*record, *options, "-o", str(recorded), given.script, *own], out / "record.log", {**env, "PYTHONPATH": here})
    for old in replayed.glob("*"):
        old.unlink()
    there = os.pathsep.join([*given.path, *filter(None, [env.get("PYTHONPATH")])])
    own = [each.replace("{out}", str(out / "there")) for each in given.arguments]
    command = [given.python, str(REPLAY), str(recorded), str(replayed), given.script, *own]
    _run(command, out / "replay.log", {**env, "PYTHONPATH": there})
    if not (replayed / "replayed.json").exists():
        raise RuntimeError(f"it trained fewer steps under TensorFlow 1.15 than were recorded; see {out / 'replay.log'}")
    return compare(recorded / "rank_0", replayed)


def _run(command, log, env):
    with open(log, "w") as file:
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=env, check=False).returncode
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    for line in lines:
        if line.startswith(("record: not re", "replay: this graph")):
            print(line)
    if code:
        raise RuntimeError(f"{command[0]} ended with exit code {code}: {lines[-1] if lines else ''} ({log})")


def compare(recorded: pathlib.Path, replayed: pathlib.Path) -> list[Difference]:
    """Losses, trained weights and slots of two trainings."""
    facts, there = (json.loads(path.read_text()) for path in (recorded / "record.json", replayed / "replayed.json"))
    if there["drawn"]:
        print(f"drawn, not replayed: {', '.join(there['drawn'])}")
    pairs = zip(facts["losses"], there["losses"])
    losses = {f"step {step}": pair for step, pair in enumerate(pairs) if None not in pair}
    before, ours = (np.load(recorded / name) for name in ("weights.npz", "weights_after.npz"))
    genuine = np.load(replayed / "weights_after.npz")
    both = [name for name in ours.files if name in genuine.files and ours[name].dtype.kind == "f"]
    changed = [name for name in both if not np.array_equal(before[name], ours[name])]
    kinds = {"loss": losses, "weights": {}, "slots": {}}
    for name in changed:
        kinds["weights" if name in facts["trained"] else "slots"][name] = (ours[name], genuine[name])
    missing = sorted(set(ours.files) - set(genuine.files))
    if missing:
        print(f"not there: {', '.join(missing)}")
    return [_largest(kind, arrays) for kind, arrays in kinds.items()]


def _largest(kind, arrays):
    apart = {name: relative(*pair) for name, pair in arrays.items()}
    where = max(apart, key=lambda name: apart[name], default="nothing")
    return Difference(kind, apart.get(where, 0.0 if kind == "slots" else float("nan")), where, len(apart))


def relative(here: np.ndarray, there: np.ndarray) -> float:
    """The largest difference as a share of the largest number; infinite where one is not finite."""
    here, there = (np.asarray(each, np.float64) for each in (here, there))
    if here.shape != there.shape or not np.array_equal(np.isfinite(here), np.isfinite(there)):
        return float("inf")
    if not here.size or np.array_equal(here, there, equal_nan=True):
        return 0.0
    return float(np.nanmax(np.abs(here - there)) / np.nanmax(np.abs([here, there])))


def first_operator(out: pathlib.Path, tolerance: float) -> str:
    """A sentence about the first tensor of a recorded step that is off by more than the tolerance."""
    types = json.loads((out / "recorded/rank_0/record.json").read_text())["types"]
    for path in sorted((out / "recorded/rank_0").glob("tensors_*.npz")):
        here, there = np.load(path), np.load(out / "replayed" / path.name)
        for name in here.files:
            apart = relative(here[name], there[name]) if name in there.files else 0.0
            if apart > tolerance:
                return f"the first operator is {name} ({types[name]}), {apart:.2g} off in step {int(path.stem[-5:])}"
    return "no operator differs that much by itself"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
