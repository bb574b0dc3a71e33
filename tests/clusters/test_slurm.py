"""Jobs under a real Slurm: one `npu-run` for each, which starts the ranks."""

from __future__ import annotations

import contextlib
import re
import textwrap

import pytest

from tests.clusters.conftest import needs_slurm, wait_until
from tests.launch.elastic_scripts import SCRIPTS, assert_alike
from tests.launch.launching import ROOT, needs_horovod, write_script

pytestmark = [needs_horovod, needs_slurm]


def requeueing_script():
    """The script of docs/elastic.md, on one node."""
    page = (ROOT / "docs" / "elastic.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"^```sh\n(#!/bin/bash\n.*?)^```", page, re.MULTILINE | re.DOTALL)
    script = re.sub(r"^hosts=.*\n", "", script, flags=re.MULTILINE)
    return script.replace("--nodes=2", "--nodes=1").replace(
        '-H "$hosts" --min-np 4 train.py', '$OPTIONS train.py out "$@"'
    )


def state_of(slurm, job):
    found = re.search(r"JobState=(\w+)", slurm("scontrol", "show", "job", job))
    return found[1] if found else ""


def has_ended(slurm, job, starts):
    """Whether a job has ended the last time; between two starts it has several states, for a moment each."""
    state, restarts = state_of(slurm, job), re.search(r"Restarts=(\d+)", slurm("scontrol", "show", "job", job))
    if int(restarts[1]) + 1 < starts:
        return False
    if state == "PENDING":  # queued again, Slurm would let it wait for two minutes
        with contextlib.suppress(AssertionError):  # it has just been started
            slurm("scontrol", "update", f"JobId={job}", "StartTime=now")
    return state in ("COMPLETED", "FAILED", "CANCELLED")


def test_srun_starts_a_training_on_two_ranks(slurm, tmp_path, undisturbed):
    write_script(tmp_path, SCRIPTS["estimator"])
    output = slurm("srun", "--nodes=1", "--ntasks=1", "npu-run", "-np", "2", "train.py", "out", cwd=tmp_path)
    assert "trained 120 steps on 2 ranks" in output
    assert_alike(tmp_path / "out.npz", undisturbed)


@pytest.mark.parametrize("fault", ["15", "9"], ids=["preempted", "a rank is killed"])
def test_a_batch_job_that_is_disturbed_comes_to_its_end(slurm, tmp_path, undisturbed, fault):
    """Preempted, it saves and is queued again by its own script; where a rank is killed, the others go on."""
    write_script(tmp_path, SCRIPTS["estimator"])
    (tmp_path / "job.sh").write_text(textwrap.dedent(requeueing_script()))
    options = "--export=ALL,OPTIONS=-np 2 --min-np 1 --cool-down 1000"
    files = ("--output=job.log", "--open-mode=append")
    job = slurm("sbatch", "--parsable", *files, options, "job.sh", f"1:40:{fault}", cwd=tmp_path).strip()
    wait_until(lambda: has_ended(slurm, job, starts=2 if fault == "15" else 1))
    log = (tmp_path / "job.log").read_text()
    assert state_of(slurm, job) == "COMPLETED", log
    assert "suffers" in log
    assert ("exit code 75. The same command goes on from there" in log) == (fault == "15"), log
    assert ("rank 1 of 2 was killed by SIGKILL" in log) == (fault == "9"), log
    assert_alike(tmp_path / "out.npz", undisturbed)
