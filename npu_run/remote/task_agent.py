"""Runs a cluster's task other than task 0: connects to task 0 of the job, and runs one rank for it (`tasks.py`)."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import signal
import socket
import time
from collections.abc import Sequence
from typing import Callable, NoReturn

from npu_bridge.base import environment
from npu_bridge.base.reading import open_file
from npu_run.errors import LaunchError
from npu_run.remote.cluster import ClusterTask, cluster_task
from npu_run.remote.host_agent import read_messages, run_job
from npu_run.remote.tasks import (
    ADDRESS_FILE_START,
    address_file_name,
    compute_proof,
    core_numbers,
    explain_distrust,
    read_line,
    remove_timeout,
)

# The exit code of ssh when the connection fails.
_LOST_EXIT_CODE = 255
_CONNECT_SECS = 3.0
_TICK_SECS = 0.1
_MOST_BYTES = 1 << 16


def find_task(words: Sequence[str]) -> ClusterTask | None:
    """Returns the cluster task of this process and its job; None if there is no task, or the job has no name.

    Args:
      words: the command line. Its hash is part of the job's name, because a cluster job can run two commands at once.
    Raises:
      LaunchError: a variable of the cluster is malformed.
    """
    try:
        task = cluster_task()
        name = task and (task.job or _hydra_address())
    except ValueError as error:
        raise LaunchError(str(error)) from error
    if task is None or not name:
        return None
    command = hashlib.sha256(json.dumps(list(words)).encode()).hexdigest()[:8]
    return task._replace(job=f"{re.sub(r'[^A-Za-z0-9_-]', '_', name)[:100]}-{command}")


def serve_task_0(task: ClusterTask, wait_secs: float, say: Callable[[str], None]) -> NoReturn:
    """Runs a rank for each job that task 0 starts, and ends with the exit code that task 0 sends.

    Args:
      task: this task.
      wait_secs: how long to look for task 0.
      say: called with a sentence when task 0 is lost.
    Raises:
      LaunchError: task 0 is not found.
    """
    connection = _find_task_0(task, wait_secs)
    for file in (0, 1):  # an agent's input and output, for every kind of connection
        os.dup2(connection.fileno(), file)
    connection.close()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):  # task 0 gets them, too, and decides
        signal.signal(number, lambda number, frame: None)

    def leave() -> NoReturn:
        say(f"task {task.number} of {task.count} has lost task 0, and stopped its rank; exit code {_LOST_EXIT_CODE}")
        os._exit(_LOST_EXIT_CODE)

    messages = read_messages()
    for message in messages:
        if "exit" in message:
            os._exit(message["exit"])
        if "ranks" in message:
            run_job(message, messages, leave)
    leave()


def _find_task_0(task: ClusterTask, wait_secs: float) -> socket.socket:
    """Connects to task 0; each end first proves that it knows the job's secret."""
    limit = time.monotonic() + wait_secs
    while True:
        for address, secret in _addresses_of_task_0(task):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                return _connect(task, address, secret)
        if time.monotonic() >= limit:
            break
        time.sleep(_TICK_SECS)
    first = environment.read_variable(environment.FIRST_TASK)
    where = (
        f"at {first} ({environment.FIRST_TASK})" if first else f"by the file {address_file_name(task)} in {os.getcwd()}"
    )
    with contextlib.suppress(OSError):
        problem = explain_distrust(os.stat(address_file_name(task)))
        where += f", which {problem}" if problem and not first else ""
    raise LaunchError(
        f"task {task.number} of {task.count} has not found task 0 within {wait_secs:.0f} s. Expected task 0 {where}. "
        f"Start the same command in the same folder in every task, or use -np 1 for a separate training in each task."
    )


def _addresses_of_task_0(task: ClusterTask) -> list[tuple[tuple[str, int], str]]:
    """Returns the addresses at which task 0 can listen, each with the job's secret."""
    first, secret = map(environment.read_variable, (environment.FIRST_TASK, environment.JOB_SECRET))
    if first:
        host, _, port = first.rpartition(":")
        return [((host, int(port)), secret or "")] if port.isdecimal() else []
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        with open_file(address_file_name(task), "rb") as file:
            found = os.fstat(file.fileno())
            text = file.read(_MOST_BYTES)
        if not explain_distrust(found) and re.match(ADDRESS_FILE_START, text):
            facts = json.loads(text)
            here = ["127.0.0.1"] if facts["host"] == socket.gethostname() else []
            addresses = dict.fromkeys([*here, *map(str, facts["addresses"])])
            return [((address, int(facts["port"])), str(facts["secret"])) for address in addresses]
    return []


def _connect(task: ClusterTask, address: tuple[str, int], secret: str) -> socket.socket:
    """Connects to task 0 at an address.

    Raises:
      OSError, ValueError, KeyError, TypeError: the listener is not task 0 of this job.
    """
    connection = socket.create_connection(address, _CONNECT_SECS)
    try:
        ours = secrets.token_hex(16)
        connection.sendall(json.dumps({"nonce": ours}).encode() + b"\n")
        said = read_line(connection)
        if not secrets.compare_digest(said["proof"], compute_proof(secret, "first", task.job, ours)):
            raise ValueError("the listener is not task 0 of this job")
        proof = compute_proof(secret, str(task.number), task.job, said["nonce"])
        facts = {"task": task.number, "host": socket.gethostname(), "cores": sorted(core_numbers())}
        connection.sendall(json.dumps({**facts, "proof": proof}).encode() + b"\n")
        remove_timeout(connection)
        return connection
    except BaseException:
        connection.close()
        raise


def _hydra_address() -> str:
    """Returns the address that MPICH's launcher gives its proxy, different for each job; "" under other launchers."""
    with contextlib.suppress(ImportError):  # psutil is installed with Horovod, which several ranks need
        import psutil

        with contextlib.suppress(psutil.Error):
            for parent in psutil.Process().parents():
                words = parent.cmdline()
                if "--control-port" in words[:-1]:
                    return words[words.index("--control-port") + 1]
    return ""
