"""Jobs whose logs and output go to a disk that is full for a while."""

from __future__ import annotations

import re

import pytest

from npu_run.job.output import RankLog
from tests.npu_run.launching import LIMIT_SECS, finish, npu_run, read_until, start, write_script
from tests.small_disk import small_disk  # noqa: F401 - a fixture

# Every rank prints until its log has come back; rank 0 fills the disk and makes room again, when the test has read that
# both logs are not written.
FILLING = """
    import os, pathlib, sys, time
    from tests.small_disk import SmallDisk

    rank, disk = os.environ["RANK_ID"], SmallDisk(pathlib.Path(sys.argv[1]))
    log = pathlib.Path(sys.argv[1], "logs", f"rank_{rank}.log")

    def wait_for(condition, text=""):
        while not condition():
            print(text or "waiting", flush=True)
            time.sleep(0.05)

    print("before", flush=True)
    wait_for(lambda: "before" in log.read_text())
    if rank == "0":
        disk.fill()
        pathlib.Path("full.0").touch()
    wait_for(pathlib.Path("full.0").exists)
    print("full " * 2000, flush=True)
    if rank == "0":
        wait_for(pathlib.Path("told").exists)
        disk.make_room()
        pathlib.Path("room").touch()
    wait_for(pathlib.Path("room").exists)
    wait_for(lambda: "after" in log.read_text(), "after")
"""


def test_a_full_disk_ends_the_log_and_not_the_job(tmp_path, small_disk):  # noqa: F811
    write_script(tmp_path, FILLING)
    process = start("-np", "2", "--logs", "--out", small_disk.path / "logs", "train.py", small_disk.path, cwd=tmp_path)
    logs = [f"the log {small_disk.path}/logs/rank_{rank}.log" for rank in range(2)]
    reason = "No space left on device; the rest continues without it"
    early = ""
    while not all(f"npu-run: {log} is not written any more: {reason}\n" in early for log in logs):
        early += read_until(process, "\n")
    (tmp_path / "told").touch()
    code, output = finish(process)
    output = early + output
    assert code == 0
    for rank, log in enumerate(logs):
        stopped = f"npu-run: {log} is not written any more: {reason}"
        assert output.splitlines().count(stopped) == 1
        assert output.splitlines().count(f"npu-run: {log} is written again") == 1
        lines = (small_disk.path / "logs" / f"rank_{rank}.log").read_text().splitlines()
        assert re.match(r"--- [\d: -]+ rank \d of 2: train.py", lines[0]) and "before" in lines
        assert lines[-1] == "after" and set(lines[1:]) <= {"before", "waiting", "after", ("full " * 2000)}


def test_a_log_that_was_full_for_long_says_how_much_is_missing(tmp_path, small_disk, monkeypatch):  # noqa: F811
    monkeypatch.setattr("npu_bridge.base.secondary_files._PAUSE_SECS", 0.0)
    monkeypatch.setattr("npu_bridge.base.secondary_files._LONGEST_PAUSE_SECS", 0.0)
    monkeypatch.setattr("npu_bridge.base.secondary_files._KEPT_BYTES", 10_000)
    said = []
    small_disk.fill()
    log = RankLog(small_disk.path / "logs", 0, "title", said.append)  # in a folder that cannot be made yet
    for number in range(100):
        log.receive_output("stdout", b"%999d\n" % number)
    small_disk.make_room()
    log.receive_output("stdout", b"last ")
    log.receive_output("stdout", b"line\n")
    log.close()
    lines = (small_disk.path / "logs" / "rank_0.log").read_text().splitlines()
    assert re.fullmatch(r"--- 900\d\d bytes are not here: No space left on device", lines[0])
    assert [line.strip() for line in lines[1:]] == [*map(str, range(90, 100)), "last line"]
    assert ["not written any more" in text for text in said] == [True, False]


@pytest.mark.slow("logs on a full disk have a fast case")
def test_output_that_goes_to_a_full_disk_does_not_end_the_job(tmp_path, small_disk):  # noqa: F811
    write_script(tmp_path, "import os\nprint('x' * 100_000)\nopen(f'done.{os.environ[\"RANK_ID\"]}', 'w')")
    small_disk.fill()
    with open(small_disk.path / "output", "w") as file:
        process = start("-np", "2", "train.py", cwd=tmp_path, output=file.fileno())
        assert process.wait(timeout=LIMIT_SECS) == 0
    assert (tmp_path / "done.0").exists() and (tmp_path / "done.1").exists()


OF_1 = """
import subprocess
import tensorflow as tf
assert tf.Session and tf.contrib
print("trained", subprocess.getoutput("echo data"))
"""


@pytest.mark.slow("several commands on a full disk")
def test_where_temporary_files_have_no_room_a_script_runs_and_what_needs_them_says_so(tmp_path, small_disk):  # noqa: F811
    small_disk.fill(left_bytes=8192)  # enough for Python, which tries four bytes
    temporary = {"TMPDIR": str(small_disk.path)}
    write_script(tmp_path, OF_1)
    code, output = npu_run("train.py", cwd=tmp_path, **temporary)
    assert code == 0 and "trained data\n" in output
    problem = (
        f"temporary files: they cannot be written. Expected a folder with room; got {small_disk.path} (No space left "
        "on device). Make room in the folder, or name another folder: TMPDIR=/path"
    )
    assert f"the python3 for processes of this script is not written any more: {problem}; the rest continues" in output
    assert npu_run("try", "train.py", cwd=tmp_path, **temporary) == (2, f"npu-run try: {problem}\n")
    assert [each.name for each in small_disk.path.iterdir()] == ["filling"]


@pytest.mark.parametrize("folder", ["file/below", "/proc/1/nowhere"])
def test_a_folder_that_is_none_is_refused_before_anything_starts(tmp_path, folder):
    (tmp_path / "file").touch()
    write_script(tmp_path, "open('started', 'w')")
    code, output = npu_run("--logs", "--out", folder, "train.py", cwd=tmp_path)
    assert code == 2 and output.startswith(f"npu-run: --out {folder} cannot be written (") and output.count("\n") == 1
    assert not (tmp_path / "started").exists()
