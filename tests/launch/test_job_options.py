"""Options of npu-run on real jobs: logs, restarts, rank tables."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import termios

import pytest

from npu_bridge.launch import cli
from npu_bridge.launch.job.supervisor import Outcome
from tests.launch.launching import LIMIT_SECS, finish, needs_horovod, npu_run, start, wait_for, write_script
from tests.launch.test_hosts import write_table

pytestmark = [pytest.mark.ranks(2), needs_horovod]


def log_lines(folder, rank):
    return (folder / "logs" / f"rank_{rank}.log").read_text().splitlines()


def test_log_dir_keeps_what_each_rank_prints_and_what_was_there(tmp_path):
    write_script(
        tmp_path,
        """
        import os, sys
        print("word of", os.environ["RANK_ID"])
        print("error of", os.environ["RANK_ID"], file=sys.stderr)
        print("10 %\\r20 %\\r30 %", end="")
        """,
    )
    for _ in range(2):
        code, output = npu_run("-np", "2", "--log-dir", "logs", "train.py", cwd=tmp_path)
        assert code == 0
        assert "word of 0" in output.splitlines() and "[rank 1] word of 1" in output.splitlines()
    for rank in (0, 1):
        lines = log_lines(tmp_path, rank)
        assert len(lines) == 8
        assert lines[0].startswith("--- ") and lines[0].endswith(f"rank {rank} of 2: train.py")
        assert sorted(lines[1:4]) == sorted([f"word of {rank}", f"error of {rank}", "30 %"])


def test_one_rank_alone_has_a_log_too_and_needs_no_horovod(tmp_path):
    write_script(tmp_path, "import os, sys\nprint(os.environ['RANK_ID'], 'horovod' in sys.modules)\nsys.exit(3)")
    code, _ = npu_run("--log-dir", "logs", "train.py", cwd=tmp_path)
    assert code == 3
    assert log_lines(tmp_path, 0)[1] == "0 False"


def test_rank_0_keeps_its_terminal_while_it_is_logged(tmp_path):
    write_script(
        tmp_path,
        """
        import os, sys
        if os.environ["RANK_ID"] == "0":
            print("terminal", sys.stdout.isatty(), os.get_terminal_size().columns)
        """,
    )
    screen, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 111, 0, 0))
    process = start("-np", "2", "--log-dir", "logs", "train.py", cwd=tmp_path, output=terminal)
    os.close(terminal)
    assert process.wait(timeout=LIMIT_SECS) == 0
    shown = os.read(screen, 1000).splitlines()
    assert shown == [b"npu-run: starting 2 ranks of train.py", b"terminal True 111"]
    os.close(screen)
    assert log_lines(tmp_path, 0)[1:] == ["terminal True 111"]


def test_log_dir_that_cannot_be_made_is_told(tmp_path):
    write_script(tmp_path, "")
    (tmp_path / "logs").write_text("a file")
    code, output = npu_run("-np", "2", "--log-dir", "logs", "train.py", cwd=tmp_path)
    assert code == 2
    assert output.startswith("npu-run: --log-dir logs cannot be written") and len(output.splitlines()) == 1


FAILS_TWICE = """
    import os, pathlib, signal, sys, time
    attempts = lambda: len(list(pathlib.Path(".").glob("attempt.*")))
    if os.environ["RANK_ID"] == "0":
        while attempts() < 3:
            time.sleep(0.02)
        print("done in attempt", attempts(), "of 1 +", os.environ["NPU_RUN_RESTARTS"])
    else:
        attempt = attempts() + 1
        pathlib.Path(f"attempt.{attempt}").touch()
        if attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if attempt == 2:
            sys.exit(7)
"""


def test_restarts_start_the_whole_job_again_until_it_succeeds(tmp_path):
    write_script(tmp_path, FAILS_TWICE)
    code, output = npu_run("-np", "2", "--restarts", "5", "--log-dir", "logs", "train.py", cwd=tmp_path)
    assert code == 0
    said = [line for line in output.splitlines() if line.startswith("npu-run: restart")]
    assert said == [
        "npu-run: restart 1 of 5, after exit code 137",
        "npu-run: restart 2 of 5, after exit code 7",
    ]
    assert "done in attempt 3 of 1 + 5" in output.splitlines()
    assert sum(line.startswith("---") for line in log_lines(tmp_path, 1)) == 3


def test_the_last_exit_code_counts_when_restarts_are_used_up(tmp_path):
    write_script(tmp_path, FAILS_TWICE)
    code, output = npu_run("-np", "2", "--restarts", "1", "train.py", cwd=tmp_path)
    assert code == 7
    assert output.splitlines()[-1].startswith("npu-run: rank 1 of 2 ended with sys.exit(7)")


def test_a_stopped_job_is_not_restarted(tmp_path):
    write_script(tmp_path, "import pathlib, time\npathlib.Path('up').touch()\ntime.sleep(600)")
    process = start("-np", "2", "--restarts", "3", "train.py", cwd=tmp_path)
    wait_for((tmp_path / "up").exists, "a rank to be up")
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 128 + signal.SIGTERM
    assert "restart" not in output


def test_success_is_not_restarted():
    assert cli._run_again(lambda: Outcome(0, has_failed=False), 3) == 0


def test_rank_table_of_this_machine_starts_its_ranks_on_its_devices(tmp_path):
    write_table(tmp_path, [("127.0.0.1", [(0, 6), (1, 7)]), ("127.0.0.2", [(2, 6)])])
    write_script(
        tmp_path,
        """
        import os
        names = "RANK_ID RANK_SIZE DEVICE_ID ASCEND_DEVICE_ID".split()
        print(*(os.environ[name] for name in names), os.path.basename(os.environ["RANK_TABLE_FILE"]))
        """,
    )
    code, output = npu_run("--rank-table", "table.json", "train.py", "--rank-table", cwd=tmp_path, DEVICE_ID="3")
    assert code == 0
    assert sorted(output.splitlines()) == sorted(
        ["0 3 6 6 table.json", "[rank 1] 1 3 7 7 table.json", "[rank 2] 2 3 6 6 table.json"]
    )
