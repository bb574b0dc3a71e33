"""Jobs under a real Slurm: one `npu-run` for each, which starts the ranks."""

from __future__ import annotations

import contextlib
import re
import textwrap
import time

import pytest

from tests.clusters.conftest import needs_slurm
from tests.npu_run.elastic_scripts import TRAINING, assert_alike
from tests.npu_run.launching import LIMIT_SECS, ROOT, needs_horovod, wait_for, write_script

pytestmark = [pytest.mark.slow("jobs of a Slurm of this machine; make test-clusters"), needs_horovod, needs_slurm]


def requeueing_script():
    """The script of docs/elastic.md, on one node."""
    page = (ROOT / "docs" / "elastic.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"^```sh\n(#!/bin/bash\n.*?)^```", page, re.MULTILINE | re.DOTALL)
    script = re.sub(r"^hosts=.*\n", "", script, flags=re.MULTILINE)
    return script.replace("--nodes=2", "--nodes=1").replace(
        '-H "$hosts" --min-np 4 train.py', '$OPTIONS train.py out "$@"'
    )


def state_and_starts(slurm, job):
    shown = slurm("scontrol", "show", "job", job)
    return re.search(r"JobState=(\w+)", shown)[1], 1 + int(re.search(r"Restarts=(\d+)", shown)[1])


def end_of(slurm, job, starts):
    """Returns the state of a job that was started this often and is over; a job about to be queued again looks the
    same.

    Slurm would let a job that is queued again wait for two minutes. Here it starts after five seconds: at once, nodes
    would refuse it because of the previous start's signature, which has just been revoked.
    """
    limit, since, before = time.monotonic() + LIMIT_SECS, time.monotonic(), ("", 0)
    while True:
        state, started = state_and_starts(slurm, job)
        assert time.monotonic() < limit, state
        since, before = since if (state, started) == before else time.monotonic(), (state, started)
        is_steady = time.monotonic() > since + 5
        if is_steady and started >= starts and state in ("COMPLETED", "FAILED", "CANCELLED"):
            return state
        if is_steady and state == "PENDING":
            with contextlib.suppress(AssertionError):  # it has just been started
                slurm("scontrol", "update", f"JobId={job}", "StartTime=now")
        time.sleep(0.1)


@pytest.mark.parametrize("fault", ["15", "9"], ids=["preempted", "a rank is killed"])
def test_a_batch_job_that_is_disturbed_comes_to_its_end(slurm, tmp_path, undisturbed, fault):
    """Preempted, it saves and its own script queues it again; if a rank is killed, the others continue."""
    write_script(tmp_path, TRAINING)
    (tmp_path / "job.sh").write_text(textwrap.dedent(requeueing_script()))
    options = "--export=ALL,OPTIONS=-np 2 --min-np 1 --cool-down 1000"
    files = ("--output=job.log", "--open-mode=append")
    job = slurm("sbatch", "--parsable", *files, options, "job.sh", f"1:40:{fault}", cwd=tmp_path).strip()
    state = end_of(slurm, job, starts=2 if fault == "15" else 1)
    log = (tmp_path / "job.log").read_text()
    assert state == "COMPLETED", log
    assert "suffers" in log
    assert ("exit code 75. The same command resumes from there" in log) == (fault == "15"), log
    assert ("rank 1 of 2 was killed by SIGKILL" in log) == (fault == "9"), log
    assert_alike(tmp_path / "out.npz", undisturbed)


def test_a_batch_job_of_tasks_is_queued_again_at_an_early_signal(slurm, tmp_path, undisturbed):
    """The script of docs/clusters.md; `scancel` sends the signal that `--signal` has Slurm send to the steps."""
    write_script(tmp_path, TRAINING)
    page = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"^```sh\n(#!/bin/bash\n[^`]*--signal=TERM@120\n.*?)^```", page, re.MULTILINE | re.DOTALL)
    script = script.replace("--ntasks=8", "--nodes=2 --ntasks=2").replace("train.py", "train.py out 1:40:0")
    (tmp_path / "job.sh").write_text(script)
    job = slurm("sbatch", "--parsable", "--output=job.log", "--open-mode=append", "job.sh", cwd=tmp_path).strip()
    log = tmp_path / "job.log"
    wait_for(lambda: log.exists() and "suffers" in log.read_text(), "the training")
    slurm("scancel", "--signal=TERM", job)
    assert end_of(slurm, job, starts=2) == "COMPLETED", log.read_text()
    assert log.read_text().count("exit code 75. The same command resumes from there") == 1
    assert 40 <= int(re.search(r"resuming from step (\d+)", log.read_text()).group(1)) < 120
    assert_alike(tmp_path / "out.npz", undisturbed)
