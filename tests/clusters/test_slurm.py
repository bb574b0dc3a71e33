"""Jobs under a real Slurm: a controller and two nodes, all on this machine, made for these tests."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import textwrap
import time

import pytest

from tests.launch.elastic_scripts import SCRIPTS, assert_alike
from tests.launch.launching import LIMIT_SECS, ROOT, needs_horovod, npu_run, write_script

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch")
pytestmark = [
    needs_horovod,
    pytest.mark.skipif(
        not all(map(shutil.which, PROGRAMS)) or os.geteuid() != 0,
        reason="Slurm is not installed (apt-get install slurm-wlm munge), or this is not root",
    ),
]
CONFIG = """
ClusterName=test
SlurmctldHost={name}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SwitchType=switch/none
MpiDefault=none
KillWait=60
ReturnToService=2
SchedulerParameters=sched_interval=1
NodeName=n1 NodeHostname={name} NodeAddr=127.0.0.1 Port={first} CPUs=2 State=UNKNOWN
NodeName=n2 NodeHostname={name} NodeAddr=127.0.0.1 Port={second} CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def free_ports(count):
    """Ports that nobody listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """Runs a command of Slurm in a folder; gives what it prints."""
    folder = tmp_path_factory.mktemp("slurm")
    os.chmod(folder, 0o755)
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    names = dict(zip(("port", "first", "second"), free_ports(3)))
    (folder / "slurm.conf").write_text(CONFIG.format(name=socket.gethostname(), folder=folder, **names))
    paths = {"PYTHONPATH": str(ROOT), "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), **paths}
    files = {"key": "key-file", "socket": "socket", "pid": "pid-file", "log": "log-file", "seed": "seed-file"}
    munge = [f"--{option}={folder}/munge.{name}" for name, option in files.items()]
    commands = [
        ["munged", "--foreground", "--force", *munge],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", "n1"],
        ["slurmd", "-D", "-N", "n2"],
    ]
    started = []
    try:
        for command in commands:
            started.append(subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL))
            if command[0] == "munged":
                wait_until((folder / "munge.socket").exists)

        def run(*command, cwd=folder):
            done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=LIMIT_SECS)
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout + done.stderr

        wait_until(lambda: run("sinfo", "--noheader", "--format=%t %D").strip() == "idle 2")
        yield run
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait()


def wait_until(is_so):
    limit = time.monotonic() + LIMIT_SECS
    while not is_so():
        assert time.monotonic() < limit
        time.sleep(0.1)


def requeueing_script():
    """The script of docs/elastic.md, on one node."""
    page = (ROOT / "docs" / "elastic.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"^```sh\n(#!/bin/bash\n.*?)^```", page, re.MULTILINE | re.DOTALL)
    script = re.sub(r"^hosts=.*\n", "", script, flags=re.MULTILINE)
    return script.replace("--nodes=2", "--nodes=1").replace(
        '-H "$hosts" --min-np 4 train.py', '$OPTIONS train.py out "$@"'
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    place = tmp_path_factory.mktemp("undisturbed")
    write_script(place, SCRIPTS["estimator"])
    code, output = npu_run("train.py", "out", cwd=place)
    assert code == 0, output
    import numpy as np

    with np.load(place / "out.npz") as weights:
        return dict(weights)


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
