"""Damaged files of every kind that commands read: an answer or one sentence, never a traceback, never a long wait."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import stat
from pathlib import Path

import click.testing
import numpy as np
import pytest

from npu_run.bisect import Bisection
from npu_run.errors import LaunchError
from npu_run.record import replay
from tests.npu_run.damaging import damaged, run, write_good

# So many damaged files of each kind; NPU_BRIDGE_FUZZ=1000 looks further.
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="devices are made by root alone")
CASES = int(os.environ.get("NPU_BRIDGE_FUZZ", 20))


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A folder of good files, and what `write_good` says of them."""
    folder = tmp_path_factory.mktemp("good")
    return folder, write_good(folder)


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
    cases = 0
    for kind, (name, (command, argument)) in kinds.items():
        content = (folder / name).read_bytes()
        code, output = run(command, here / argument, here, folder / argument)
        assert code in (0, 2) and "npu-run" not in output and "problem" not in output, (kind, output)
        for number in range(CASES):
            case = f"{kind} {number}"
            (here / name).write_bytes(damaged(content, case))
            try:
                check(case, *run(command, here / argument, here, folder / argument))
            except Exception as error:
                raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error
        (here / name).write_bytes(content)
        cases += CASES
    print(f"{cases} damaged files")


LINK, PIPE, SOCKET, DEVICE, FOLDER = "a symbolic link", "a pipe (FIFO)", "a socket", "a device", "a folder"
# A path named by a person can be a link, as rank tables of clusters are.
GIVEN = {"pairs", "summary", "rank table", "hosts"}


def put(kind, path, aside):
    """Puts something in the place of a file, whose content is in another folder then."""
    shutil.move(path, aside / path.name)
    if kind == LINK:
        path.symlink_to(aside / path.name)
    elif kind == PIPE:
        os.mkfifo(path)
    elif kind == SOCKET:
        with socket.socket(socket.AF_UNIX) as listening, contextlib.chdir(path.parent):
            listening.bind(path.name)
    elif kind == DEVICE:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))  # which gives zeros for ever
    else:
        path.mkdir()


@pytest.mark.parametrize("what", [LINK, PIPE, SOCKET, FOLDER, pytest.param(DEVICE, marks=needs_root)])
def test_what_is_no_file_is_refused_at_once(good, tmp_path, monkeypatch, what):
    monkeypatch.delenv("RANK_TABLE_FILE", raising=False)
    folder, kinds = good
    for number, (kind, (name, (command, argument))) in enumerate(kinds.items()):
        here, aside = tmp_path / f"{number}", tmp_path / f"aside-{number}"
        shutil.copytree(folder, here)
        aside.mkdir()
        put(what, here / name, aside)
        code, output = run(command, here / argument, here, folder / argument)
        if what == LINK and kind in GIVEN:
            assert code == 0, (kind, output)
            continue
        assert code == 2 and output.count("\n") == 1, (kind, output)
        assert what in output or what == FOLDER, (kind, output)


@pytest.mark.parametrize(
    "place", ["../{0}", "{1}/{0}", "../../../../../../../secret.npy", "sub/{0}", "./../3/{0}", "a\0b"]
)
def test_a_name_in_a_dump_leads_nowhere_else(good, tmp_path, place):
    """Neither out of its folder nor through a link to another one; nothing is linked, and nothing copied."""
    folder, kinds = good
    here = tmp_path / "here"
    shutil.copytree(folder / "dump", here / "dump")
    index = here / kinds["index of a dump"][0]
    for outside in (tmp_path, index.parent.parent):
        np.save(outside / "secret.npy", np.arange(12, dtype=np.float32))
    (index.parent / "sub").symlink_to(tmp_path)
    facts = json.loads(index.read_text())
    facts["tensors"][0]["file"] = place.format("secret.npy", tmp_path)
    index.write_text(json.dumps(facts))
    code, output = run("name", here / "dump", here, None)
    assert code == 2 and output.startswith("cannot be told: ") and output.count("\n") == 1
    assert not list((here / "out").glob("*.npy"))
    code, output = run("compare", here / "dump", here, folder / "dump")
    assert code == 2 and output.startswith("cannot be told: ") and output.count("\n") == 1, output


def test_names_are_written_as_copies(good, tmp_path):
    folder, kinds = good
    assert run("name", folder / "dump", tmp_path, None)[0] == 0
    written = list((tmp_path / "out").glob("*.npy"))
    assert len(written) == 2 and all(path.stat().st_nlink == 1 and not path.is_symlink() for path in written)
    (tmp_path / "out" / written[0].name).unlink()
    (tmp_path / "out" / written[0].name).symlink_to(tmp_path / "elsewhere")
    assert run("name", folder / "dump", tmp_path, None)[0] in (0, 2)
    assert not (tmp_path / "elsewhere").exists()


def test_a_page_takes_its_history_from_its_own_folder(good, tmp_path):
    folder, _ = good
    shutil.copytree(folder / "run", tmp_path / "run")
    shutil.move(tmp_path / "run" / "history.jsonl", tmp_path / "history.jsonl")
    for name in ("../history.jsonl", str(tmp_path / "history.jsonl")):
        facts = json.loads((folder / "run" / "report.json").read_text())
        (tmp_path / "run" / "report.json").write_text(json.dumps({**facts, "history": name}))
        code, output = run("report", tmp_path / "run", tmp_path, None)
        assert code == 2 and "leads out of" in output and output.count("\n") == 1


@pytest.mark.parametrize("what", [LINK, PIPE, SOCKET])
def test_a_record_is_refused_before_ranks_read_it(tmp_path, what):
    (tmp_path / "train.py").write_text("open('started', 'w')")
    for number, name in enumerate(("record.json", "weights.npz")):
        recorded, aside = tmp_path / f"recorded-{number}", tmp_path / f"aside-{number}"
        (recorded / "rank_0").mkdir(parents=True)
        aside.mkdir()
        for each in ("record.json", "weights.npz"):
            (recorded / "rank_0" / each).write_text("{}")
        put(what, recorded / "rank_0" / name, aside)
        arguments = ["--out", str(tmp_path / "out"), str(recorded), str(tmp_path / "train.py")]
        done = click.testing.CliRunner().invoke(replay, arguments, catch_exceptions=False)
        assert done.exit_code == 2 and done.output.count("\n") == 1 and what in done.output, done.output
        assert not (tmp_path / "started").exists() and not Path("started").exists()


STATES = ["", "[]", "{}", '{"asked": 1, "runs": []}', '{"asked": {}, "runs": [{"kept": 1}]}', "[" * 99999]


@pytest.mark.parametrize("content", STATES, ids=range(len(STATES)))
def test_the_state_of_a_search_that_is_damaged_is_told(tmp_path, content):
    (tmp_path / "state.json").write_text(content)
    with pytest.raises(LaunchError, match=r"state.json does not come from an earlier search"):
        Bisection(str(tmp_path), "force_fp16", 2, 0.1, 9, ["train.py"])._load_runs_of_earlier_search()
