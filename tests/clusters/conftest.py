"""A real Slurm, with a controller and two nodes, all on this machine; and what trainings are compared with."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys

import pytest

from npu_bridge.base.environment import RANK_VARIABLES
from tests.npu_run.elastic_scripts import train_undisturbed
from tests.npu_run.launching import LIMIT_SECS, ROOT, kept_addresses, wait_for

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch")
LACKS_SLURM = not all(map(shutil.which, PROGRAMS)) or os.geteuid() != 0
needs_slurm = pytest.mark.skipif(
    LACKS_SLURM, reason="Slurm is not installed (apt-get install slurm-wlm munge), or this is not root"
)
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


def outside_ranks():
    """An environment that says nothing about ranks, in which `npu-run` is that of this tree."""
    paths = {"PYTHONPATH": str(ROOT), "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
    return {**{name: text for name, text in os.environ.items() if name not in RANK_VARIABLES}, **paths}


@pytest.fixture(scope="session")
def slurm_ports():
    """A port for the controller and for each node, kept until Slurm has ended."""
    with kept_addresses(3) as addresses:
        yield {name: address.rpartition(":")[2] for name, address in zip(("port", "first", "second"), addresses)}


@pytest.fixture(scope="session")
def slurm(tmp_path_factory, slurm_ports):
    """Runs a command of Slurm in a folder; gives what it prints. Its `environment` is that of other commands."""
    folder = tmp_path_factory.mktemp("slurm")
    os.chmod(folder, 0o755)
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    (folder / "slurm.conf").write_text(CONFIG.format(name=socket.gethostname(), folder=folder, **slurm_ports))
    environment = {**outside_ranks(), "SLURM_CONF": str(folder / "slurm.conf")}
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
                wait_for((folder / "munge.socket").exists, "munge")

        def run(*command, cwd=folder):
            done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=LIMIT_SECS)
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout + done.stderr

        wait_for(lambda: run("sinfo", "--noheader", "--format=%t %D").strip() == "idle 2", "two idle nodes")
        run.environment = environment
        yield run
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    return train_undisturbed(tmp_path_factory.mktemp("undisturbed"))
