"""Good files of every kind that commands read, what reads them, and ways in which they are damaged, by a seed."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import random
import re
import signal
import warnings
from pathlib import Path
from typing import Any

import click.testing
import numpy as np

from npu_run.compare.command import compare
from npu_run.errors import LaunchError
from npu_run.job.hosts import plan_job
from npu_run.predict.command import plan
from npu_run.report import report
from tests.npu_run.compare.test_files import write_events, write_tensors
from tests.npu_run.test_hosts import write_table
from tests.reporting.test_page import write_history

# Only what hangs takes as long as this, however busy the machine is.
LIMIT_SECS = 200

WRONG = (None, True, -1, 0, 10**23, 2**63, -(2**63) - 1, 1e308, float("nan"), float("inf"), 0.5, "", "x", "nan", [], {})
WRONG += ("\x1b[2J\x07", "../../../etc/passwd", "/etc/passwd", "1" * 300, [[]], [None], {"a": None}, "\ud800", "\0")


def write_good(folder: Path) -> dict[str, tuple[str, list[str]]]:
    """Writes a training, a dump, a timeline and more.

    Returns:
      For each kind of file its path in the folder, and the command that reads it, as `run` of the test takes it.
    """
    run = folder / "run"
    (run / "timeline").mkdir(parents=True)
    write_history(str(run), [3.0 - 0.01 * step for step in range(40)], skipped={7}, restarts={20})
    facts = {"script": "t.py", "command": "python t.py", "folder": "/", "began": 1e9, "history": "history.jsonl"}
    facts |= {"options": [["a", "b", "c", "d"]], "variables": [["a", "b", "c"]], "environment": [["a", "b"]]}
    (run / "report.json").write_text(json.dumps({**facts, "ranks": [{"host": "h", "cores": 2, "process": 1}, {}]}))
    trace = {"rank": 0, "step": 5, "duration_ms": 9.0, "exposed_ms": 1.0}
    tail = {"rank": 0, "steps": [5], "step_ms": 9.0, "exposed_ms": 1.0, "shown_step": 5}
    (run / "timeline" / "tail.json").write_text(json.dumps({**tail, "traces": [trace, {**trace, "rank": 1}]}))
    (run / "timeline" / "tail.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"><text>a</text></svg>')
    (folder / "alone").mkdir()
    write_history(str(folder / "alone"), [3.0 - 0.01 * step for step in range(10)], ranks=1)
    write_table(folder, [("127.0.0.1", [(0, 0), (1, 1)])])
    (folder / "hosts").write_text("h1 slots=4\nh2:2\n")
    events = folder / "events"
    write_events(events, [3.0 - 0.01 * step for step in range(40)])
    saved = folder / "saved"
    saved.mkdir()
    values = {"a/w": np.arange(40, dtype=np.float32).reshape(5, 8), "b": np.int32([1, 2, 3])}
    write_tensors(str(saved / "model.ckpt-7"), values)
    dump = folder / "dump" / "20260101000000" / "0" / "graph" / "0" / "3"
    dump.mkdir(parents=True)
    rows = []
    for name in ("one", "two"):
        np.save(dump / f"{name}.npy", np.arange(12, dtype=np.float32).reshape(3, 4))
        row = {"file": f"{name}.npy", "op": name, "type": "Relu", "side": "output", "slot": 0}
        rows.append({**row, "tensor": f"{name}:0", "dtype": "float32", "shape": [3, 4]})
    (dump / "index.json").write_text(json.dumps({"step": 3, "graph": "g", "tensors": rows}))
    (dump.parent / "operators.json").write_text(json.dumps([["one", "Relu", []], ["two", "Relu", ["one:0"]]]))
    named = folder / "named"
    named.mkdir()
    np.save(named / "7.npy", np.ones(3, np.float32))
    with open(named / "mapping.csv", "w", newline="") as file:
        csv.writer(file).writerows([("7.npy", "a_b.0.1234567.npy")])
    (folder / "names.csv").write_text("one,one\ntwo,two\n")
    in_dump = os.path.relpath(dump, folder)
    return {
        "history": ("run/history.jsonl", ["compare", "run"]),
        "history of a page": ("run/history.jsonl", ["report", "run"]),
        "facts": ("run/report.json", ["report", "run"]),
        "timeline": ("run/timeline/tail.json", ["report", "run"]),
        "picture": ("run/timeline/tail.svg", ["report", "run"]),
        "events": (f"events/{os.listdir(events)[0]}", ["compare", "events"]),
        "index of a checkpoint": ("saved/model.ckpt-7.index", ["compare", "saved"]),
        "data of a checkpoint": ("saved/model.ckpt-7.data-00000-of-00001", ["compare", "saved"]),
        "index of a dump": (f"{in_dump}/index.json", ["compare", "dump"]),
        "named index": (f"{in_dump}/index.json", ["name", "dump"]),
        "operators": (f"{os.path.dirname(in_dump)}/operators.json", ["compare", "dump"]),
        "array": (f"{in_dump}/one.npy", ["compare", "dump"]),
        "named array": ("named/7.npy", ["compare", "named"]),
        "mapping": ("named/mapping.csv", ["compare", "named"]),
        "pairs": ("names.csv", ["pairs", "dump"]),
        "planned history": ("alone/history.jsonl", ["plan", "alone"]),
        "rank table": ("table.json", ["table", "table.json"]),
        "hosts": ("hosts", ["hosts", "hosts"]),
    }


def damaged(good: bytes, seed: str) -> bytes:
    chance = random.Random(seed)
    way = chance.choice([_cut, _flipped, _numbers, _numbers, _wrong_values, _wrong_values, _wrong_values, _other])
    return way(good, chance)


def _cut(good: bytes, chance: random.Random) -> bytes:
    return good[: chance.randrange(len(good))]


def _flipped(good: bytes, chance: random.Random) -> bytes:
    content = bytearray(good)
    for _ in range(chance.choice([1, 2, 20])):
        content[chance.randrange(len(content))] = chance.randrange(256)
    return bytes(content)


def _numbers(good: bytes, chance: random.Random) -> bytes:
    """Another number in place of one, or of all."""
    new = chance.choice(
        [b"1" + b"0" * 23, b"-1", b"1e400", b"NaN", b"9" * 5000, b"-9223372036854775809", b"0", b"1e-320"]
    )
    found = list(re.finditer(rb"\d+(\.\d+)?", good))
    if not found:
        return good + new
    if chance.random() < 0.2:
        return re.sub(rb"\d+(\.\d+)?", new, good)
    place = chance.choice(found)
    return good[: place.start()] + new + good[place.end() :]


def _wrong_values(good: bytes, chance: random.Random) -> bytes:
    """Another value somewhere in JSON, or in a line of it."""
    try:
        lines = good.decode().splitlines() if good[:2] == b'{"' and good.count(b"\n") > 2 else [good.decode()]
        number = chance.randrange(len(lines))
        content = _changed(json.loads(lines[number]), chance)
    except ValueError:
        return _flipped(good, chance)
    lines[number] = json.dumps(content)
    return "\n".join(lines).encode()


def _changed(content: Any, chance: random.Random) -> Any:
    if isinstance(content, dict) and content and chance.random() < 0.85:
        key = chance.choice(list(content))
        changed = {**content, key: _changed(content[key], chance)}
        return {name: value for name, value in changed.items() if name != key} if chance.random() < 0.15 else changed
    if isinstance(content, list) and content and chance.random() < 0.85:
        place = chance.randrange(len(content))
        return [*content[:place], _changed(content[place], chance), *content[place + 1 :]]
    return chance.choice(WRONG)


def _other(good: bytes, chance: random.Random) -> bytes:
    long = b"\x93NUMPY\x01\0v\0{'descr': '<f4', 'fortran_order': False, 'shape': (" + b"9" * 60
    others = [b"", b"\0" * 100, b"[" * 100_000, chance.randbytes(500), b"null", b"[]", b"{}", b'"text"', b"1", long]
    others += [b"{" * 9 + good, b"\xff\xfe" + good, good * 3, b"\x93NUMPY\x09\0" + good[8:]]
    others += [good.replace(b"<f4", b"|O8"), good.replace(b"<f4", b"|S0"), good.replace(b"False", b"True")]
    return chance.choice(others)


@contextlib.contextmanager
def limited():
    def stop(*_):
        raise AssertionError(f"more than {LIMIT_SECS} s in vain")

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_SECS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def run(command, path, folder, good):
    """Exit code and output of a command about a damaged path."""
    commands = {
        "compare": (compare, [good, path, "-o", folder / "page.html"]),
        "name": (compare, [path, "--write-names", folder / "out"]),
        "pairs": (compare, [good, path, "--names", folder / "names.csv", "-o", folder / "page.html"]),
        "report": (report, [path, "-o", folder / "page.html"]),
        "plan": (plan, ["--params", "1M", "--bandwidth", "1Gbit", "--ranks", "1,2", "--from-run", path]),
    }
    if command in commands:
        entry, arguments = commands[command]
        with limited(), warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            done = click.testing.CliRunner().invoke(entry, list(map(str, arguments)), catch_exceptions=False)
        return done.exit_code, done.output
    reader = {
        "table": lambda: plan_job(None, rank_table=str(path)),
        "hosts": lambda: plan_job(None, hostfile=str(path)),
    }[command]
    try:
        with limited():
            reader()
    except LaunchError as error:
        return 2, f"npu-run: {error}\n"
    return 0, ""
