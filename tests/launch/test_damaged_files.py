"""Damaged files of every kind that commands read: an answer or one sentence, never a traceback, never a long wait."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import warnings

import click.testing
import pytest

from npu_bridge.launch.compare import compare
from npu_bridge.launch.errors import LaunchError
from npu_bridge.launch.job.hosts import plan_job
from npu_bridge.launch.predict.command import plan
from npu_bridge.launch.predict.split import announce_split
from npu_bridge.launch.report import report
from tests.launch.damaging import damaged, write_good

# So many damaged files of each kind; NPU_BRIDGE_FUZZ=1000 looks further.
CASES = int(os.environ.get("NPU_BRIDGE_FUZZ", 20))
# Of computing, which only what never ends takes.
LIMIT_SECS = 20


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A folder of good files, and what `write_good` says of them."""
    folder = tmp_path_factory.mktemp("good")
    return folder, write_good(folder)


@contextlib.contextmanager
def limited():
    def stop(*_):
        raise AssertionError(f"more than {LIMIT_SECS} s of computing")

    signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_SECS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def run(command, path, folder, good):
    """Exit code and output of a command about a damaged path."""
    commands = {
        "compare": (compare, [good, path, "-o", folder / "page.html"]),
        "name": (compare, [path, "--write-names", folder / "out"]),
        "pairs": (compare, [good, path, "--names", folder / "names.csv", "-o", folder / "page.html"]),
        "report": (report, [path, "-o", folder / "page.html"]),
        "plan": (plan, ["--params", "1M", "--bandwidth", "1Gbit", "--ranks", "1,2", "--from-summary", path]),
    }
    if command in commands:
        entry, arguments = commands[command]
        with limited(), warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            done = click.testing.CliRunner().invoke(entry, list(map(str, arguments)), catch_exceptions=False)
        return done.exit_code, done.output
    reader = {
        "split": lambda: announce_split(str(path)),
        "table": lambda: plan_job(None, rank_table=str(path)),
        "hosts": lambda: plan_job(None, hostfile=str(path)),
    }[command]
    try:
        with limited():
            reader()
    except LaunchError as error:
        return 2, f"npu-run: {error}\n"
    return 0, ""


def check(case, code, output):
    assert code in (0, 1, 2), (case, output)
    assert not set(output) & set(map(chr, [*range(9), *range(11, 32), *range(127, 160)])), (case, output)
    if output.startswith(("cannot be told:", "npu-run")):
        assert code == 2 and output.count("\n") == 1 and len(output) < 2000, (case, output)


def test_damaged_files_are_told_in_one_sentence(good, tmp_path, monkeypatch):
    monkeypatch.delenv("RANK_TABLE_FILE", raising=False)
    folder, kinds = good
    here = tmp_path / "here"
    shutil.copytree(folder, here)
    codes, cases = [], 0
    for kind, (name, (command, argument)) in kinds.items():
        content = (folder / name).read_bytes()
        code, output = run(command, here / argument, here, folder / argument)
        assert code in (0, 2) and "npu-run" not in output and "problem" not in output, (kind, output)
        for number in range(CASES):
            case = f"{kind} {number}"
            (here / name).write_bytes(damaged(content, case))
            try:
                check(case, *run(command, here / argument, here, folder / argument))
                codes.append(code)
            except BaseException as error:
                if not os.environ.get("NPU_BRIDGE_FUZZ"):
                    raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error
                import traceback

                tb = traceback.extract_tb(error.__traceback__)
                ours = [f for f in tb if "npu_bridge/" in f.filename]
                print(
                    "BAD",
                    case,
                    type(error).__name__,
                    str(error)[:150].replace("\n", " "),
                    [f"{os.path.basename(f.filename)}:{f.lineno}" for f in ours[-3:]],
                )
        (here / name).write_bytes(content)
        cases += CASES
    print(f"{cases} damaged files")
