"""Options of npu-run: logs, restarts, rank tables."""

from __future__ import annotations

import pytest

from npu_bridge.base.output_folders import claim_output_folder
from npu_run.job import starts
from npu_run.job.outcome import Outcome
from npu_run.outputs import MADE_BY
from tests.npu_run.launching import needs_horovod, npu_run, write_script
from tests.npu_run.test_hosts import write_table

pytestmark = [pytest.mark.ranks(2), needs_horovod]


def log_lines(folder, rank):
    return (folder / "logs" / f"rank_{rank}.log").read_text().splitlines()


def test_logs_keep_what_each_rank_prints_and_what_was_there(tmp_path):
    write_script(
        tmp_path,
        """
        import os, sys
        sys.stdout.write(f"word of {os.environ['RANK_ID']}\\n")  # in one piece: parts of lines are shown, too
        sys.stderr.write(f"error of {os.environ['RANK_ID']}\\n")
        print("10 %\\r20 %\\r30 %", end="")
        """,
    )
    earlier = ["--- 2026-01-02 03:04:05 rank 1 of 2: train.py", "of an earlier run"]
    with claim_output_folder(str(tmp_path / "logs"), "npu-run", "--out", MADE_BY["npu-run"]):
        (tmp_path / "logs" / "rank_1.log").write_text("\n".join([*earlier, ""]))
    code, output = npu_run("-np", "2", "--logs", "train.py", cwd=tmp_path)
    assert code == 0
    assert "word of 0" in output.splitlines() and "[rank 1] word of 1" in output.splitlines()
    for rank in (0, 1):
        *before, title, first, second, third = log_lines(tmp_path, rank)
        assert before == earlier * rank
        assert title.startswith("--- ") and title.endswith(f"rank {rank} of 2: train.py")
        assert sorted([first, second, third]) == sorted([f"word of {rank}", f"error of {rank}", "30 %"])


def test_one_rank_alone_has_a_log_too_and_needs_no_horovod(tmp_path):
    write_script(tmp_path, "import os, sys\nprint(os.environ['RANK_ID'], 'horovod' in sys.modules)\nsys.exit(3)")
    code, _ = npu_run("--logs", "train.py", cwd=tmp_path)
    assert code == 3
    assert log_lines(tmp_path, 0)[1] == "0 False"


def test_a_system_that_names_no_ended_processes_runs_jobs_too(tmp_path):
    """As macOS before Python 3.13, with a low limit on open files."""
    write_script(tmp_path, "print('ran')")
    other = "import os, resource\ndel os.waitid, resource.prlimit\n"
    other += "resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))"
    assert npu_run("--logs", "train.py", cwd=tmp_path, prepare=other) == (0, "ran\n")


def test_restarts_end_with_success_a_stop_or_when_they_are_used_up():
    failed, done, stopped = Outcome(7, has_failed=True), Outcome(0, has_failed=False), Outcome(143, has_failed=False)
    used_up = [failed, failed, Outcome(9, has_failed=True)]
    for outcomes, code in (([done], 0), ([failed, done], 0), ([stopped], 143), (used_up, 9)):
        left = iter(outcomes)
        assert starts.run_with_restarts(lambda left=left: next(left), 2) == code
        assert not list(left)


def test_rank_table_of_this_machine_starts_its_ranks_on_its_devices(tmp_path):
    write_table(tmp_path, [("127.0.0.1", [(0, 6), (1, 7)]), ("127.0.0.2", [(2, 6)])])
    write_script(
        tmp_path,
        """
        import os, sys
        names = "RANK_ID RANK_SIZE DEVICE_ID ASCEND_DEVICE_ID".split()
        seen = [*(os.environ[name] for name in names), os.path.basename(os.environ["RANK_TABLE_FILE"])]
        sys.stdout.write(" ".join(seen) + "\\n")  # in one piece: parts of lines are shown, too
        """,
    )
    code, output = npu_run("--rank-table", "table.json", "train.py", "--", "--rank-table", cwd=tmp_path, DEVICE_ID="3")
    assert code == 0
    assert sorted(output.splitlines()) == sorted(
        ["0 3 6 6 table.json", "[rank 1] 1 3 7 7 table.json", "[rank 2] 2 3 6 6 table.json"]
    )
