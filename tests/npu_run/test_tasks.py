"""Tasks of a cluster, started by hand with the variables of one: how they find each other, and who is not let in."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import threading
from types import SimpleNamespace

import pytest

from npu_run.remote import tasks as tasks_module
from npu_run.remote.cluster import cluster_task
from npu_run.remote.task_agent import find_task
from npu_run.remote.tasks import ConnectedTasks, address_file_name, compute_proof
from tests.npu_run.launching import (
    finish,
    kept_addresses,
    needs_horovod,
    npu_run,
    read_until,
    start,
    wait_for,
    write_script,
)
from tests.npu_run.test_local_ranks import WAITING, assert_all_gone, wait_for_pids

SAYS = """
import os, sys
names = "RANK_ID RANK_SIZE DEVICE_ID GREETING NPU_RUN_SET SLURM_PROCID HOROVOD_GLOO_IFACE"
values = ["seen", *(str(os.environ.get(name)) for name in names.split()), *sys.argv[1:]]
sys.stdout.write(" ".join(values) + "\\n")  # at once, so that no other rank's line can come into it
"""


def variables_of(task, count=2, job="7"):
    """Returns the variables of one step of Slurm on one node."""
    counts = {"SLURM_STEP_NUM_TASKS": str(count), "SLURM_STEP_TASKS_PER_NODE": str(count)}
    return {"SLURM_PROCID": str(task), "SLURM_JOB_ID": job, "SLURM_STEP_ID": "0", **counts}


def start_all(folder, *words, order=(0, 1)):
    """Starts `npu-run words...` once for each task."""
    names = [{**variables_of(task, len(order)), "GREETING": f"of {task}"} for task in order]
    return [start(*words, cwd=folder, **each) for each in names]


@needs_horovod
@pytest.mark.ranks(3)
def test_each_task_runs_one_rank_in_its_own_environment(tmp_path):
    write_script(tmp_path, SAYS)
    words = ["--set", "hccl_timeout=5", "train.py", "a b", "$HOME"]
    first, *others = start_all(tmp_path, *words, order=(0, 2, 1))
    code, output = finish(first)
    assert code == 0
    for rank in range(3):
        prefix = f"[rank {rank}] " if rank else ""
        assert f'{prefix}seen {rank} 3 {rank} of {rank} ["hccl_timeout=5"] {rank} lo a b $HOME\n' in output
    assert [finish(other) for other in others] == [(0, "")] * 2
    assert os.listdir(tmp_path) == ["train.py"]


@pytest.mark.slow("signals to the launcher have a fast case")
@needs_horovod
@pytest.mark.ranks(2)
def test_what_only_one_task_is_told_becomes_an_ordered_end_of_all(tmp_path):
    """As a pod that is evicted: its task alone gets the signal first, and then all get it."""
    write_script(
        tmp_path,
        """
        import os, time
        from npu_bridge.session.elastic import stop_request
        request = stop_request.stop_request_of_process()
        with request.handle_requests(2):
            print("trains", flush=True)
            while not request.is_due:
                request.begin_run()
                time.sleep(0.1)
            while not os.path.exists("told twice"):
                time.sleep(0.01)
            request.exit_after_save(7)
        """,
    )
    processes = start_all(tmp_path, "train.py")
    first, other = processes
    said = read_until(first, "trains") + read_until(first, "trains")
    other.send_signal(signal.SIGTERM)
    said += read_until(first, "a second signal stops them at once")
    first.send_signal(signal.SIGTERM)
    (tmp_path / "told twice").touch()
    code, output = finish(first)
    assert code == 75, said + output
    assert "SIGTERM (rank 1 received it)" in said and "ended after step 7; exit code 75" in output
    assert finish(other) == (75, "")


@pytest.mark.few_fast(1, "the other task takes the same way")
@needs_horovod
@pytest.mark.ranks(2)
@pytest.mark.parametrize("dying", [0, 1])
def test_a_task_that_is_killed_is_named_and_leaves_nothing_behind(tmp_path, dying):
    write_script(tmp_path, WAITING)
    processes = start_all(tmp_path, "train.py")
    pids = wait_for_pids(tmp_path)
    processes[dying].kill()
    code, output = finish(processes[1 - dying])
    cause = (
        f"rank 1 of 2 was lost: task 1 on {socket.gethostname()} has ended" if dying else "task 1 of 2 has lost task 0"
    )
    assert code == 255 and f"npu-run: {cause}" in output
    assert_all_gone(pids)


@pytest.mark.slow("waits for tasks that do not come")
def test_tasks_that_do_not_find_each_other_say_so_in_one_sentence(tmp_path):
    write_script(tmp_path, SAYS)
    processes = [start("--wait", 0.5, "train.py", task, cwd=tmp_path, **variables_of(task)) for task in range(2)]
    codes, outputs = zip(*map(finish, processes))
    assert codes == (2, 2)
    assert outputs[0].startswith(
        "npu-run: task 1 of 2 did not connect within 0 s. Expected the same command, in this folder"
    )
    assert outputs[1].startswith(
        "npu-run: task 1 of 2 has not found task 0 within 0 s. Expected task 0 by the file .npu-run-"
    )
    assert [output.count("\n") for output in outputs] == [1, 1]


@pytest.mark.few_fast(1, "the other file in the same way")
@pytest.mark.parametrize(("permissions", "is_tried"), [(0o644, False), (0o600, True)])
def test_a_file_that_leads_elsewhere_is_not_trusted(tmp_path, permissions, is_tried, monkeypatch):
    """One that others can read could be theirs; one of an earlier job names a port that another process has by now."""
    write_script(tmp_path, SAYS)
    words = ["--wait", "2", "train.py"]
    for name, text in variables_of(1).items():
        monkeypatch.setenv(name, text)
    path = tmp_path / address_file_name(find_task(words))
    heard = []

    def answer(server):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                with connection:
                    heard.append(connection.recv(4096))
                    connection.sendall(b'{"nonce": "n", "proof": "p"}\n')
                    heard.append(connection.recv(4096))

    with socket.create_server(("127.0.0.1", 0)) as server:
        place = {"host": socket.gethostname(), "addresses": [], "port": server.getsockname()[1], "secret": "s"}
        path.write_text(json.dumps({"made_by": "npu-run", **place}))
        path.chmod(permissions)
        threading.Thread(target=answer, args=(server,), daemon=True).start()
        code, output = npu_run(*words, cwd=tmp_path, **variables_of(1))
        server.shutdown(socket.SHUT_RDWR)
    assert code == 2 and "has not found task 0 within 2 s" in output
    assert bool(heard) == is_tried == ("which is open to other users (mode 644)" not in output)
    assert all(text.startswith(b'{"nonce"') for text in heard[::2]) and not any(heard[1::2])
    assert path.exists()  # it is not this task's


def test_task_0_does_not_wait_for_tasks_that_would_not_trust_its_file(tmp_path):
    write_script(tmp_path, SAYS)
    public = "import os\nfrom npu_run.remote import tasks\nos.umask(0o022)\n"
    public += "tasks.new_file = lambda path, **words: open(path, 'w')"  # as in a folder whose files are never private
    code, output = npu_run("--wait", 1, "train.py", cwd=tmp_path, prepare=public, **variables_of(0))
    assert code == 2 and "is open to other users (mode 644), so they would not trust it" in output, output
    assert not list(tmp_path.glob(".npu-run-*"))


@needs_horovod
@pytest.mark.ranks(2)
def test_who_does_not_know_the_secret_is_not_let_in(tmp_path):
    write_script(tmp_path, SAYS)
    first = start("train.py", cwd=tmp_path, **variables_of(0))
    wait_for(lambda: list(tmp_path.glob(".npu-run-*")), "the file")
    (path,) = tmp_path.glob(".npu-run-*")
    assert path.stat().st_mode & 0o777 == 0o600
    with socket.create_connection(("127.0.0.1", json.loads(path.read_text())["port"])) as connection:
        connection.sendall(b'{"nonce": "1"}\n')
        connection.recv(4096)
        connection.sendall(b'{"task": 1, "host": "h", "cores": [0], "proof": "0"}\n')
        assert connection.recv(4096) == b""
    other = start("train.py", cwd=tmp_path, **variables_of(1))
    assert [finish(process)[0] for process in (first, other)] == [0, 0]


@needs_horovod
@pytest.mark.ranks(2)
def test_pods_find_the_first_one_by_its_name(tmp_path):
    folders = [write_script(tmp_path / name, SAYS).parent for name in ("pod0", "pod1")]
    with kept_addresses(1) as (address,):
        job = {"NPU_RUN_TASKS": "2", "NPU_RUN_FIRST": address, "NPU_RUN_SECRET": "of this job"}
        pods = [start("train.py", cwd=folder, JOB_COMPLETION_INDEX=str(n), **job) for n, folder in enumerate(folders)]
        code, output = finish(pods[0])
        assert code == 0 and output.count("seen ") == 2
        assert finish(pods[1]) == (0, "")


def test_a_task_that_connects_while_the_job_ends_gets_its_exit_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in variables_of(0).items():
        monkeypatch.setenv(name, text)
    monkeypatch.setattr(tasks_module, "_LATE_SECS", 0.0)
    tasks = ConnectedTasks(find_task(["train.py"]), 1.0, print)
    place = json.loads((tmp_path / tasks._path).read_text())
    with socket.create_connection(("127.0.0.1", place["port"]), timeout=60) as connection:
        connection.sendall(b'{"nonce": "1"}\n')
        nonce = json.loads(connection.recv(4096))["nonce"]
        tasks.close(3)
        proof = compute_proof(place["secret"], "1", tasks._task.job, nonce)
        said = {"task": 1, "host": "h", "cores": [0], "proof": proof}
        connection.sendall(json.dumps(said).encode() + b"\n")
        assert json.loads(connection.recv(4096)) == {"exit": 3}


def test_a_connection_that_cannot_be_accepted_is_not_the_last_one():
    accepted, results = [], [OSError(errno.EMFILE, "too many open files"), ("a connection", None)]

    def accept():
        result = results.pop(0)
        if isinstance(result, OSError):
            raise result
        return result

    tasks = ConnectedTasks.__new__(ConnectedTasks)
    tasks._listener = SimpleNamespace(fileno=lambda: len(results) - 1, accept=accept)
    tasks._authenticate = accepted.append
    tasks._accept_connections()
    wait_for(lambda: accepted == ["a connection"], "the second connection", limit_secs=10)


def test_a_connection_for_which_no_thread_can_be_started_is_not_the_last_one(monkeypatch):
    accepted, ends = [], [end for _ in range(2) for end in socket.socketpair()]
    waiting, own, start = ends[::2], threading.get_ident(), threading.Thread.start

    def start_second(thread):
        if threading.get_ident() == own and len(waiting) == 1:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_second)
    tasks = ConnectedTasks.__new__(ConnectedTasks)
    tasks._listener = SimpleNamespace(fileno=lambda: len(waiting) - 1, accept=lambda: (waiting.pop(0), None))
    tasks._authenticate = accepted.append
    tasks._accept_connections()
    wait_for(lambda: accepted == [ends[2]], "the second connection")
    assert ends[0].fileno() == -1
    for end in ends:
        end.close()


def test_slots_of_tasks_cannot_be_left_out(tmp_path):
    write_script(tmp_path, SAYS)
    first, other = start_all(tmp_path, "--min-np", 1, "--cool-down", 60, "train.py")
    code, output = finish(first)
    assert (code, output.count("\n")) == (2, 1)
    assert "--cool-down excludes slots of hosts, but a task always keeps its slot. Omit --cool-down." in output
    assert finish(other) == (2, "")


def test_a_secret_is_needed_where_a_variable_names_the_first_task(tmp_path):
    write_script(tmp_path, SAYS)
    job = {"NPU_RUN_TASKS": "2", "NPU_RUN_FIRST": "localhost:1", "JOB_COMPLETION_INDEX": "0"}
    code, output = npu_run("train.py", cwd=tmp_path, **job)
    assert (code, output) == (2, "npu-run: NPU_RUN_FIRST is set without NPU_RUN_SECRET. Set both.\n")


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", **variables_of(0)},
        {"HOROVOD_CONTROLLER": "mpi", **variables_of(0)},
        variables_of(0, count=1),
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7"},  # a batch script, and not a step
        {"JOB_COMPLETION_INDEX": "1"},  # pods that have nothing to do with each other
    ],
)
def test_what_is_no_task(variables, monkeypatch):
    for name in [name for name in os.environ if name.startswith(("SLURM", "PMI", "OMPI", "HOROVOD"))]:
        monkeypatch.delenv(name)
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    assert cluster_task() is None


@needs_horovod
def test_processes_of_mpirun_that_horovod_does_not_join_are_refused(warm_python, tmp_path):
    (tmp_path / "train.py").write_text("from npu_bridge import collective\nprint(collective.current().size)\n")
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    world = {f"OMPI_COMM_WORLD_{name}": str(2 if "SIZE" in name else 1) for name in names}
    done = warm_python.run([tmp_path / "train.py"], tmp_path, env={**os.environ, **world})
    assert done.returncode == 1 and "Expected 2 ranks; got 1. Write npu-run in place of python" in done.stderr
