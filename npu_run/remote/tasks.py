"""Joins the tasks of a cluster into one job, in task 0: the cluster has started `npu-run` once for each rank.

`mpirun` and `srun` start the same command several times, and bind each task to its cores and GPUs. Task 0 becomes the
launcher and runs rank 0. Task 0 writes its address to a private file in the current folder; every other task
(`task_agent.py`) connects to that address, and runs one rank for task 0.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import os
import re
import secrets
import select
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Callable, NamedTuple

from npu_bridge.base import environment
from npu_bridge.base.address import addresses_of_this_machine, find_interface
from npu_bridge.base.files import new_file, remove_file_with_text
from npu_run.errors import LaunchError
from npu_run.job.hosts import JobPlan
from npu_run.job.output import JointStream
from npu_run.remote.cluster import ClusterTask
from npu_run.remote.host import RemoteHost

ADDRESS_FILE_START = rb'^\{"made_by": "npu-run"'
_LOCAL = "127.0.0.1"
_HANDSHAKE_SECS = 10.0
_SILENT_SECS = 5.0
_CLOSE_SECS = 5.0
# How long a finished job waits for tasks that have not connected yet, to tell them its exit code.
_LATE_SECS = 15.0
_PAUSE_SECS = 0.1
_LINE_BYTES = 1 << 16
_CHUNK_BYTES = 65536


class _TaskAgent(NamedTuple):
    """A connected task other than task 0, with its host, its connection, and the cores that it can use."""

    number: int
    host: str
    cores: frozenset[int]
    socket: socket.socket

    @property
    def name(self) -> str:
        return f"task {self.number} on {self.host}"

    @property
    def is_gone(self) -> bool:
        """Whether the connection has ended; to be read only while no job uses the connection."""
        try:
            return not self.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True


class ConnectedTasks:
    """All tasks of a job, with the connections from task 0 to the other tasks.

    Args:
      task: this task.
      wait_secs: how long to wait for the other tasks.
      say: called with a sentence when the wait is long.
    Raises:
      LaunchError: the file with the address cannot be written, or no socket can listen on this machine.
    """

    def __init__(self, task: ClusterTask, wait_secs: float, say: Callable[[str], None]):
        self.count = task.count
        self._task, self._wait_secs, self._say = task, wait_secs, say
        self._agents: dict[int, _TaskAgent] = {}
        self._exit_code: int | None = None
        self._before = dict(os.environ)
        self._agents_changed = threading.Condition()
        self._host, self._cores = socket.gethostname(), core_numbers()
        self._path, self._text = address_file_name(task), ""
        first = environment.read_variable(environment.FIRST_TASK)
        self._secret = environment.read_variable(environment.JOB_SECRET) if first else secrets.token_hex(16)
        if not self._secret:
            raise LaunchError(f"{environment.FIRST_TASK} is set without {environment.JOB_SECRET}. Set both.")
        try:
            port = int(first.rpartition(":")[2]) if first else 0
            self._listener = socket.create_server((_LOCAL if task.is_local else "", port), backlog=1024)
            if not first:
                addresses = [_LOCAL] if task.is_local else addresses_of_this_machine()
                place = {"host": self._host, "addresses": addresses, "port": self._listener.getsockname()[1]}
                self._text = json.dumps({"made_by": "npu-run", **place, "secret": self._secret})
                with new_file(self._path, own_content_pattern=ADDRESS_FILE_START, permissions=0o600) as file:
                    file.write(self._text)
                problem = explain_distrust(os.stat(self._path))
                if problem:
                    remove_file_with_text(self._path, self._text)
                    raise PermissionError(f"{self._path} {problem}, so they would not trust it")
        except (OSError, ValueError, OverflowError) as error:
            raise LaunchError(
                f"the other tasks cannot find task 0 of {task.count} ({error}). Expected a writable current folder "
                f"with private files, or {environment.FIRST_TASK}=host:port of this host. Change folder or variable, "
                f"or start one task."
            ) from error
        threading.Thread(target=self._accept_connections, name="npu-run tasks", daemon=True).start()

    def slots(self) -> dict[str, int]:
        """Returns the number of connected tasks on each host; this host comes first."""
        hosts = [agent.host for agent in self._connected_agents()]
        return {host: hosts.count(host) + (host == self._host) for host in dict.fromkeys([self._host, *hosts])}

    def make_plan(self) -> JobPlan:
        """Waits for all tasks, and plans a job of all of them.

        Raises:
          LaunchError: some tasks do not connect in time.
        """
        began, has_told = time.monotonic(), False
        while missing := sorted({*range(1, self.count)} - {agent.number for agent in self._connected_agents()}):
            names = f"task {', '.join(map(str, missing[:10]))}{', ...' if missing[10:] else ''} of {self.count}"
            waited = time.monotonic() - began
            if waited >= self._wait_secs:
                raise LaunchError(
                    f"{names} did not connect within {self._wait_secs:.0f} s. Expected the same command, in this "
                    f"folder, in every task. Start the same command, raise --wait, or use -np 1 for a separate "
                    f"training in each task."
                )
            if waited >= _SILENT_SECS and not has_told:
                has_told = True
                self._say(f"waiting for {names}, up to {self._wait_secs:.0f} s")
            with self._agents_changed:
                self._agents_changed.wait(0.1)
        return JobPlan(self.count, self.slots())

    def network_places(self, size: int) -> list[tuple[str, str, str]]:
        """Returns for each rank its task's name, this machine's address for the task, and the network interface.

        The name is "" for task 0; the interface is "" on other hosts.
        """
        order = self._agents_by_rank(size)
        here = next((_local_address(agent) for agent in order if agent and agent.host != self._host), _LOCAL)
        interface = (environment.read_variable("HOROVOD_GLOO_IFACE") if here != _LOCAL else "") or find_interface(here)
        if len(order) < size:
            raise LaunchError(
                f"{len(order)} tasks are left. Expected {size}, one for each rank; the other tasks have ended. Start "
                f"the job again."
            )
        return [
            ("" if agent is None else agent.name, here, interface)
            if agent is None or agent.host == self._host
            else (agent.name, _local_address(agent), "")
            for agent in order
        ]

    def count_sharing_tasks(self, name: str) -> int:
        """Returns how many tasks share the cores of the named task, itself included; "" names task 0."""
        agents = self._connected_agents()
        places = {"": (self._host, self._cores), **{agent.name: (agent.host, agent.cores) for agent in agents}}
        host, cores = places.get(name, places[""])
        return sum(other == host and bool(theirs & cores) for other, theirs in places.values())

    def open_host(self, name: str, error_stream: JointStream) -> RemoteHost:
        """Returns a host object through which the named task runs its rank, until the object is closed."""
        with self._agents_changed:
            agent = next(agent for agent in self._agents.values() if agent.name == name)
            others = [other for other in self._agents.values() if other.host != self._host]
        if agent.host != self._host:
            peer = _local_address(agent)
        else:
            peer = others[0].socket.getpeername()[0] if others else _LOCAL
        changed = {name: text for name, text in os.environ.items() if self._before.get(name) != text}
        return _TaskConnection(
            agent, error_stream, {"peer": peer, "environment": changed, "sharing": self.count_sharing_tasks(name)}
        )

    def close(self, code: int) -> None:
        """Ends all tasks with an exit code; waits up to 15 s for tasks that have not connected yet."""
        limit = time.monotonic() + _LATE_SECS
        while len(self._agents) < self.count - 1 and time.monotonic() < limit:
            with self._agents_changed:
                self._agents_changed.wait(0.1)
        # The file goes first: a task that connects after the other tasks got the exit code belongs to a later job.
        remove_file_with_text(self._path, self._text)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._agents_changed:
            self._exit_code, agents = code, list(self._agents.values())
        for agent in agents:
            self._end_task(agent.socket)

    def _end_task(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection.sendall(json.dumps({"exit": self._exit_code}).encode() + b"\n")
        connection.close()

    def _connected_agents(self) -> list[_TaskAgent]:
        with self._agents_changed:
            return [agent for agent in self._agents.values() if not agent.is_gone]

    def _agents_by_rank(self, size: int) -> list[_TaskAgent | None]:
        """Returns the task of each rank, None for task 0; ranks are numbered host after host, as in Horovod."""
        agents = sorted(self._connected_agents(), key=lambda agent: agent.number)
        hosts = list(self.slots())
        return [None, *sorted(agents, key=lambda agent: hosts.index(agent.host))][:size]

    def _accept_connections(self) -> None:
        while self._listener.fileno() >= 0:  # until it is closed
            try:
                connection, _ = self._listener.accept()
            except OSError:  # this process has too many open files, say
                time.sleep(_PAUSE_SECS)
                continue
            try:
                threading.Thread(target=self._authenticate, args=(connection,), daemon=True).start()
            except RuntimeError:  # no more threads are allowed; the task connects again
                connection.close()

    def _authenticate(self, connection: socket.socket) -> None:
        """Accepts a connection from a task that knows the job's secret; proves first that this process is task 0."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            connection.settimeout(_HANDSHAKE_SECS)
            theirs, ours = read_line(connection), secrets.token_hex(16)
            proof = compute_proof(self._secret, "first", self._task.job, theirs["nonce"])
            connection.sendall(json.dumps({"nonce": ours, "proof": proof}).encode() + b"\n")
            said = read_line(connection)
            number, host, cores = int(said["task"]), str(said["host"]), frozenset(map(int, said["cores"]))
            is_right = hmac.compare_digest(
                said["proof"], compute_proof(self._secret, str(number), self._task.job, ours)
            )
            if is_right and 0 < number < self.count and re.fullmatch(r"[\w.-]+", host):
                remove_timeout(connection)
                with self._agents_changed:
                    if self._exit_code is not None:
                        self._end_task(connection)
                    elif number not in self._agents or self._agents[number].is_gone:
                        self._agents[number] = _TaskAgent(number, host, cores, connection)
                        self._agents_changed.notify_all()
                        return
        connection.close()


@contextlib.contextmanager
def become_launcher_of_tasks(
    task: ClusterTask, wait_secs: float, print_line: Callable[[str], None]
) -> Iterator[ConnectedTasks]:
    """Makes this task the launcher of all tasks during the block; the other tasks end with the block's exit code."""
    tasks = ConnectedTasks(task, wait_secs, print_line)
    before = signal.getsignal(signal.SIGTERM)
    # While no ranks run, the signal ends this process, with an exit code for all tasks.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    code = 1
    try:
        yield tasks
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        raise
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
        tasks.close(code)


def address_file_name(task: ClusterTask) -> str:
    """Returns the name of the file in the current folder that holds the address of task 0."""
    return f".npu-run-{task.job}"


def explain_distrust(found: os.stat_result) -> str:
    """Returns why a file with the address of task 0 cannot be trusted; "" if only this user can have written it.

    A user who can write this file could make the reader run any program.
    """
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}"
    mode = stat.S_IMODE(found.st_mode)
    return f"is open to other users (mode {mode:o})" if mode & 0o077 else ""


def compute_proof(secret: str, *words: str) -> str:
    """Returns a digest of words that only a holder of the secret can compute."""
    return hmac.new(secret.encode(), json.dumps(words).encode(), hashlib.sha256).hexdigest()


def read_line(connection: socket.socket) -> dict[str, Any]:
    """Reads one line of JSON.

    Raises:
      OSError, ValueError: no line arrives, or the line is not a JSON object.
    """
    text = b""
    while not text.endswith(b"\n"):
        piece = connection.recv(_LINE_BYTES)
        if not piece or len(text) > _LINE_BYTES:
            raise OSError(errno.EPROTO, "no line has come")
        text += piece
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("the line is not a JSON object")
    return found


class _TaskConnection(RemoteHost):
    """A `RemoteHost` whose agent is a task that runs one rank.

    After `close`, the task waits for another job or for its exit code.

    Args:
      agent: the task.
      errors: not used, because a task prints its own messages.
      facts: fields of the job message for a task; unlike a host, a task already has environment variables.
    """

    def __init__(self, agent: _TaskAgent, errors: JointStream, facts: Mapping[str, Any]):
        self._socket, self._facts = agent.socket, facts
        super().__init__(agent.name, errors)

    def _open(self) -> list[int]:
        return [self._socket.fileno()]

    def _shared_job_fields(self, peer: str) -> dict[str, Any]:
        return dict(self._facts)

    def _receive(self, file: int) -> bytes:
        try:
            return self._socket.recv(_CHUNK_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            raise
        except OSError:  # the connection was reset
            return b""

    def _send(self, line: bytes) -> None:
        self._socket.sendall(line)

    def _describe_end(self) -> str | None:
        return None if self._pipes else f"{self.host} has ended"

    def _disconnect(self) -> None:
        """Ends the job in the task; reads until the task reports that its rank has ended."""
        self.send_message(over=True, silence_secs=None)
        limit, rest = time.monotonic() + (0.0 if self.disconnect_reason else _CLOSE_SECS), self._unread
        with contextlib.suppress(OSError, ValueError):
            while time.monotonic() < limit:
                if not select.select([self._socket], [], [], 0.1)[0]:
                    continue
                piece = self._receive(self._socket.fileno())
                if not piece:
                    break
                *lines, rest = (rest + piece).split(b"\n")
                if any("over" in json.loads(line) for line in lines):
                    return
        self._socket.close()


def core_numbers() -> frozenset[int]:
    """Returns the numbers of the cores that this process can use."""
    return frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def _local_address(agent: _TaskAgent) -> str:
    """Returns this machine's address in the connection to a task."""
    return agent.socket.getsockname()[0]


def remove_timeout(connection: socket.socket) -> None:
    """Removes a connection's timeout; TCP keepalive still ends the connection when the other machine is gone."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, number in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 6)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), number)
