"""`npu-run` that a cluster starts once for each rank: under Open MPI and MPICH, and under Slurm's srun."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile

import pytest

from tests.clusters.conftest import LACKS_SLURM, needs_slurm, outside_ranks
from tests.npu_run.elastic_scripts import TRAINING, assert_alike
from tests.npu_run.launching import finish, needs_horovod, read_until, write_script
from tests.npu_run.test_local_ranks import assert_all_gone, wait_for_pids

pytestmark = [
    pytest.mark.slow("jobs of Open MPI and MPICH; make test-clusters"),
    pytest.mark.ranks(2),
    needs_horovod,
]

# As root, and on fewer cores than ranks, Open MPI wants to be told that this is meant.
COMMANDS = {
    "openmpi": ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-np", "2"],
    "mpich": ["mpirun.mpich", "-np", "2"],
    "srun": ["srun", "--nodes=2", "--ntasks=2"],
}
# Leaves the numbers of the rank's process and of its task.
WAITING = """
import os, pathlib, signal, sys, time
rank = os.environ["RANK_ID"]
pathlib.Path(f"new.{rank}").write_text(f"{os.getpid()} {os.getppid()}")
os.rename(f"new.{rank}", f"pids.{rank}")
while not os.path.exists(f"pids.{1 - int(rank)}"):
    time.sleep(0.01)
if sys.argv[1:] == ["kill", rank]:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""


def reason_to_skip(name):
    program = COMMANDS[name][0]
    if name == "srun":
        return "" if not LACKS_SLURM else needs_slurm.kwargs["reason"]
    return (
        ""
        if shutil.which(program)
        else f"there is no {program} (apt-get install {name.replace('openmpi', 'openmpi-bin')})"
    )


@pytest.fixture(scope="module", params=COMMANDS)
def launcher(request):
    """Starts a command on two tasks, in a folder; its `name` says by which launcher."""
    name = request.param
    if reason_to_skip(name):
        pytest.skip(reason_to_skip(name))
    environment = request.getfixturevalue("slurm").environment if name == "srun" else outside_ranks()

    def start(*words, cwd):
        # Two of Open MPI 4's that start at the same moment both make the folder they share, and one of them fails.
        folder = {"OMPI_MCA_orte_tmpdir_base": tempfile.mkdtemp(dir=short_folder)} if name == "openmpi" else {}
        return subprocess.Popen(
            [*COMMANDS[name], *map(str, words)],
            cwd=cwd,
            env={**environment, **folder},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def stop(process):
        """Asks for the end as a user of this launcher may: two of them kill all tasks at a SIGTERM of their own."""
        if name == "srun":
            slurm = request.getfixturevalue("slurm")
            slurm("scancel", slurm("squeue", "--noheader", "--format=%i").strip())
        else:
            process.send_signal(signal.SIGUSR1 if name == "openmpi" else signal.SIGTERM)

    start.name, start.stop = name, stop
    # Its sockets' paths have to be short.
    with tempfile.TemporaryDirectory() as short_folder:
        yield start


def test_tasks_train_as_one_job_and_go_on_after_a_preemption(launcher, tmp_path, undisturbed):
    write_script(tmp_path, TRAINING)
    words = ["npu-run", "train.py", "out", "1:40:0"]
    process = launcher(*words, cwd=tmp_path)
    said = read_until(process, "suffers")
    launcher.stop(process)
    code, output = finish(process)
    assert code == 75, said + output
    assert output.count("exit code 75. The same command resumes from there.") == 1
    code, output = finish(launcher(*words, cwd=tmp_path))
    assert code == 0
    assert 40 <= int(re.search(r"resuming from step (\d+)", output).group(1)) < 120, output
    assert "steps on 2 ranks" in output, output
    assert_alike(tmp_path / "out.npz", undisturbed)
    assert not list(tmp_path.glob(".npu-run*"))


def test_a_killed_rank_is_named_once_and_ends_all_tasks(launcher, tmp_path):
    write_script(tmp_path, WAITING)
    code, output = finish(launcher("npu-run", "train.py", "kill", 1, cwd=tmp_path))
    assert code == 128 + signal.SIGKILL
    assert output.count("npu-run: rank 1 of 2 was killed by SIGKILL") == output.count("was killed by SIGKILL") == 1
    assert_all_gone(pids_of(tmp_path))
    assert not list(tmp_path.glob(".npu-run*"))


def test_an_elastic_job_of_tasks_goes_on_after_a_killed_rank(launcher, tmp_path, undisturbed):
    write_script(tmp_path, TRAINING)
    code, output = finish(launcher("npu-run", "--min-np", 1, "train.py", "out", "1:39:9", cwd=tmp_path))
    assert code == 0, output
    assert "npu-run: 1 of 2 ranks lost; the job resumes from its last checkpoint" in output
    assert_alike(tmp_path / "out.npz", undisturbed)


@pytest.mark.parametrize("number", [0, 1])
def test_a_task_that_dies_leaves_no_rank_behind(launcher, tmp_path, number):
    write_script(tmp_path, WAITING)
    process = launcher("npu-run", "train.py", cwd=tmp_path)
    wait_for_pids(tmp_path)
    os.kill(int((tmp_path / f"pids.{number}").read_text().split()[1]), signal.SIGKILL)
    code, output = finish(process)
    assert code != 0
    assert_all_gone(pids_of(tmp_path))
    if launcher.name == "srun":  # the others leave no task the time to speak
        cause = "rank 1 of 2 was lost: task 1 on" if number else "task 1 of 2 has lost task 0"
        assert f"npu-run: {cause}" in output


def test_jobs_at_the_same_time_in_the_same_folder_do_not_meet(launcher, tmp_path):
    """Two in the same tasks, and a third one with the same command as one of them."""
    write_script(
        tmp_path,
        """
        import os, sys
        # In one piece: another rank's line may come between two.
        print(f"job {sys.argv[1]} rank {os.environ['RANK_ID']} server {os.environ['HOROVOD_GLOO_RENDEZVOUS_PORT']}")
        """,
    )
    both = "npu-run train.py a & npu-run train.py b; code=$?; wait $! && exit $code"
    processes = [launcher("bash", "-c", both, cwd=tmp_path), launcher("npu-run", "train.py", "a", cwd=tmp_path)]
    ends = [finish(process) for process in processes]
    assert [code for code, _ in ends] == [0, 0]
    said = [re.findall(r"job (\w) rank (\d) server (\d+)", output) for _, output in ends]
    jobs = {(number, job, server) for number, lines in enumerate(said) for job, _, server in lines}
    assert sorted((number, job) for number, job, _ in jobs) == [(0, "a"), (0, "b"), (1, "a")]
    assert sorted((number, *line) for number, lines in enumerate(said) for line in lines) == sorted(
        (number, job, rank, server) for number, job, server in jobs for rank in "01"
    )


def test_each_task_has_its_own_cores(launcher, tmp_path):
    write_script(
        tmp_path,
        """
        import os
        names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
        tasks = [os.environ[name] for name in names if name in os.environ]
        print("rank", os.environ["RANK_ID"], "task", tasks[0], "cores", *os.sched_getaffinity(0), "")
        """,
    )
    bind = 'number=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-$SLURM_PROCID}}; exec taskset -c "$number" npu-run train.py'
    code, output = finish(launcher("bash", "-c", bind, cwd=tmp_path))
    assert code == 0
    assert all(f"rank {rank} task {rank} cores {rank} " in output for rank in range(2))


def pids_of(folder):
    return [int(pid) for file in folder.glob("pids.*") for pid in file.read_text().split()]
