"""Makes hosts: network namespaces of this machine, joined by links of a known rate.

    with two_hosts(rate="1gbit") as hosts:
        job = hosts.run_ranks("train.py", "--steps", "20")
        print(job.exit_code, job.outputs[0], job.sent_bytes)

Every host has its own addresses, routes, names and remote shell, so `npu-run -H hosta:1,hostb:1` works there as on
machines: all messages between ranks go through the kernel's TCP and a shaped link. The hosts share processors, memory
and files. Needs root, `ip` and `tc`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Hosts", "Job", "reason_for_no_hosts", "two_hosts"]

_REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
_REMOTE_SHELL = pathlib.Path(__file__).with_name("remote_shell.py")
_PREFIX = "npulab"
_SWITCH = "switch"
_INTERFACE = "eth0"  # the same on every host, as on machines of one kind
# Enough for the largest packet the kernel hands over in one piece, and for the timer's grain at 1 Gbit/s.
_BURST = "256kb"
_QUEUE = "50ms"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Job(NamedTuple):
    """The results of a run.

    Attributes:
      exit_code: exit code of npu-run.
      text: everything that npu-run printed, also errors.
      outputs: the printed lines of each rank, in rank order.
      sent_bytes: bytes, with headers, that each host has sent on its link during the run, in host order.
      secs: duration, with the start of TensorFlow.
    """

    exit_code: int
    text: str
    outputs: list[str]
    sent_bytes: list[int]
    secs: float


def reason_for_no_hosts() -> str:
    """Returns why such hosts cannot be made here; "" if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc", "unshare", "mount") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    return _reason_of_the_system()


@contextlib.contextmanager
def two_hosts(rate: str | None = None, count: int = 2) -> Iterator[Hosts]:
    """Makes hosts named hosta, hostb, ... on one switch; removes them and all their processes at the end.

    Args:
      rate: the rate of each host's link, as `tc` writes it: "1gbit", "300mbit"; None for no limit.
      count: number of hosts, 2 to 26.
    Raises:
      RuntimeError: this machine cannot make such hosts; the message says why.
    """
    reason = reason_for_no_hosts()
    if reason:
        raise RuntimeError(f"two_hosts: {reason}. Expected root and network namespaces.")
    _remove_leftovers()
    folder = pathlib.Path(tempfile.mkdtemp(prefix=f"{_PREFIX}-{os.getpid()}-"))
    hosts = Hosts(folder, [f"host{letter}" for letter in _LETTERS[:count]])
    try:
        hosts.build(rate)
        yield hosts
    finally:
        hosts.remove()
        shutil.rmtree(folder, ignore_errors=True)


class Hosts:
    """Running hosts; made by `two_hosts`."""

    def __init__(self, folder: pathlib.Path, names: list[str]):
        self.names = names
        self.addresses = [f"10.201.0.{number}" for number in range(1, len(names) + 1)]
        self._folder = folder
        self._servers: list[subprocess.Popen] = []
        self._runs = 0
        self._rate: str | None = None

    def build(self, rate: str | None) -> None:
        """Makes namespaces, links and remote shells."""
        self._rate = rate
        self._write_files()
        for name in (_SWITCH, *self.names):
            _ip("netns", "add", _namespace(name))
            _ip("-n", _namespace(name), "link", "set", "lo", "up")
        _ip("-n", _namespace(_SWITCH), "link", "add", "bridge", "type", "bridge")
        _ip("-n", _namespace(_SWITCH), "link", "set", "bridge", "up")
        for name, address in zip(self.names, self.addresses):
            self._plug_in(name, address, rate)
        for name in self.names:
            self._servers.append(self._start_remote_shell(name))

    def remove(self) -> None:
        """Ends everything that runs on the hosts and removes them."""
        for name in (*self.names, _SWITCH):
            _remove_namespace(_namespace(name))
        for server in self._servers:
            server.wait()
            server.stdout.close()

    def command(self, host: int, *words: object) -> list[str]:
        """Returns the command line that runs `words` on a host, from outside."""
        inside = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'
        name = self.names[host]
        prefix = ["ip", "netns", "exec", _namespace(name), "unshare", "--uts", "--mount", "sh", "-c", inside, name]
        return [*prefix, str(self._folder / "hosts"), *map(str, words)]

    def environment(self, **variables: str) -> dict[str, str]:
        """Returns this process's environment, with the hosts' `ssh` first and `variables`."""
        path = os.pathsep.join([str(self._folder / "bin"), os.environ.get("PATH", os.defpath)])
        python_path = os.pathsep.join(filter(None, [str(_REPOSITORY), os.environ.get("PYTHONPATH", "")]))
        return {**os.environ, "PATH": path, "PYTHONPATH": python_path, "HOME": str(self._folder), **variables}

    def start_ranks(self, script: object, *arguments: object, slots: int = 1, options=(), **kwargs) -> subprocess.Popen:
        """Starts `npu-run` on the first host for a job on all hosts, its output in one pipe.

        Args:
          script: the script, then its `arguments`.
          slots: ranks on each host.
          options: options of npu-run.
          **kwargs: for `subprocess.Popen`, also `env`.
        """
        hosts = ",".join(f"{name}:{slots}" for name in self.names)
        words = [sys.executable, "-m", "npu_bridge.run", "-H", hosts, *options, script, *arguments]
        settings = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        settings.update(env=self.environment(), start_new_session=True)
        return subprocess.Popen(self.command(0, *words), **{**settings, **kwargs})

    def run_ranks(
        self, script: object, *arguments: object, slots: int = 1, options=(), limit_secs: float = 600.0, **kwargs
    ) -> Job:
        """Runs a script on ranks of all hosts to the end; arguments as for `start_ranks`.

        Raises:
          subprocess.TimeoutExpired: the job has not ended after `limit_secs`, and was killed.
        """
        self._runs += 1
        logs = self._folder / f"run_{self._runs}"
        before, start = self.sent_bytes(), time.monotonic()
        options = ["--logs", "--out", logs, *options]
        with self.start_ranks(script, *arguments, slots=slots, options=options, **kwargs) as process:
            try:
                text, _ = process.communicate(timeout=limit_secs)
            except subprocess.TimeoutExpired:
                self.end_all_processes()
                raise
        sent = [after - earlier for after, earlier in zip(self.sent_bytes(), before)]
        return Job(process.returncode, text, _outputs(logs), sent, time.monotonic() - start)

    def sent_bytes(self) -> list[int]:
        """Returns the bytes that each host has sent since it was made, with headers of Ethernet and above."""
        return [self._counter(name, "tx_bytes") for name in self.names]

    def cut(self, host: int = 1) -> None:
        """Takes a host off the switch: all its packets are lost in both directions, without a report to any process."""
        _ip("-n", _namespace(_SWITCH), "link", "set", self.names[host], "nomaster")

    def fix(self, host: int = 1) -> None:
        """Puts a host back."""
        _ip("-n", _namespace(_SWITCH), "link", "set", self.names[host], "master", "bridge")

    def shape(self, *words: str, host: int = 0) -> None:
        """Changes how a host sends, given in the words of `tc`; without words, restores the rate given to `build`."""
        if not words and self._rate is None:
            _output("tc", "-n", _namespace(self.names[host]), "qdisc", "delete", "dev", _INTERFACE, "root")
            return
        words = words or (*_shape(self._rate),)
        _output("tc", "-n", _namespace(self.names[host]), "qdisc", "replace", "dev", _INTERFACE, "root", *words)

    def sent_again(self) -> int:
        """Returns the TCP segments that the hosts have sent again since they were made, because no answer came."""
        texts = [_output("ip", "netns", "exec", _namespace(name), "cat", "/proc/net/snmp") for name in self.names]
        return sum(_counters(text)["RetransSegs"] for text in texts)

    def process_ids(self, host: int) -> list[int]:
        """Returns the processes that run on a host, without its remote shell."""
        servers = {server.pid for server in self._servers}
        return [number for number in _process_ids(_namespace(self.names[host])) if number not in servers]

    def end_all_processes(self) -> None:
        """Kills all processes on the hosts except their remote shells."""
        for host in range(len(self.names)):
            _kill(self.process_ids(host))

    def _counter(self, name: str, counter: str) -> int:
        path = f"/sys/class/net/{_INTERFACE}/statistics/{counter}"
        return int(_output("ip", "netns", "exec", _namespace(name), "cat", path))

    def _plug_in(self, name: str, address: str, rate: str | None) -> None:
        host, switch = _namespace(name), _namespace(_SWITCH)
        _ip("link", "add", _INTERFACE, "netns", host, "type", "veth", "peer", "name", name, "netns", switch)
        _ip("-n", switch, "link", "set", name, "master", "bridge")
        _ip("-n", switch, "link", "set", name, "up")
        _ip("-n", host, "address", "add", f"{address}/24", "dev", _INTERFACE)
        _ip("-n", host, "link", "set", _INTERFACE, "up")
        if rate is not None:
            _output("tc", "-n", host, "qdisc", "add", "dev", _INTERFACE, "root", *_shape(rate))

    def _write_files(self) -> None:
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for address, name in zip(self.addresses, self.names))]
        (self._folder / "hosts").write_text("\n".join(lines) + "\n")
        # Options before and after the host's name, as for ssh.
        options = 'while :; do case "$1" in -[opi]) shift 2;; -*) shift;; *) break;; esac; done'
        ssh = self._folder / "bin" / "ssh"
        ssh.parent.mkdir()
        call = f'exec {sys.executable} -E -S {_REMOTE_SHELL} call "$host" "$@"'
        ssh.write_text("\n".join(["#!/bin/sh", options, "host=$1", "shift", options, call, ""]))
        ssh.chmod(0o755)

    def _start_remote_shell(self, name: str) -> subprocess.Popen:
        words = self.command(self.names.index(name), sys.executable, "-E", "-S", _REMOTE_SHELL, "serve")
        bare = {"PATH": os.defpath, "HOME": str(self._folder)}
        server = subprocess.Popen(
            words, env=bare, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
        )
        if not server.stdout.readline():
            raise RuntimeError(f"two_hosts: the remote shell of {name} did not start.")
        return server


def _shape(rate: str) -> list[str]:
    return ["tbf", "rate", rate, "burst", _BURST, "latency", _QUEUE]


def _outputs(logs: pathlib.Path) -> list[str]:
    """Returns the printed lines of each rank, from the folder of --logs."""
    by_rank = sorted(logs.glob("rank_*.log"), key=lambda path: int(path.stem.partition("_")[2]))
    return [path.read_text().partition("\n")[2] for path in by_rank]  # the first line is the run's title


def _namespace(name: str) -> str:
    return f"{_PREFIX}-{os.getpid()}-{name}"


def _remove_leftovers() -> None:
    """Removes hosts whose maker died without removing them."""
    for line in _output("ip", "netns", "list").splitlines():
        found = re.match(rf"{_PREFIX}-(\d+)-\S+", line)
        if found and not os.path.exists(f"/proc/{found[1]}"):
            _remove_namespace(found[0])
    for folder in pathlib.Path(tempfile.gettempdir()).glob(f"{_PREFIX}-*-*"):
        if not os.path.exists(f"/proc/{folder.name.split('-')[1]}"):
            shutil.rmtree(folder, ignore_errors=True)


def _remove_namespace(namespace: str) -> None:
    with contextlib.suppress(subprocess.CalledProcessError):
        # Processes that a killed process was just starting appear one turn later.
        while numbers := _process_ids(namespace):
            _kill(numbers)
            time.sleep(0.02)
        _ip("netns", "delete", namespace)


def _counters(text: str) -> dict[str, int]:
    names, values = (line.split()[1:] for line in text.splitlines() if line.startswith("Tcp:"))
    return dict(zip(names, map(int, values)))


def _process_ids(namespace: str) -> list[int]:
    return [int(number) for number in _output("ip", "netns", "pids", namespace).split()]


def _kill(numbers: list[int]) -> None:
    for number in numbers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


@functools.lru_cache(maxsize=1)
def _reason_of_the_system() -> str:
    probe = _namespace("probe")
    try:
        _ip("netns", "add", probe)
        _ip("-n", probe, "link", "add", _INTERFACE, "type", "veth", "peer", "name", "other")
        _ip("-n", probe, "link", "add", "bridge", "type", "bridge")
        _output("tc", "-n", probe, "qdisc", "add", "dev", _INTERFACE, "root", *_shape("1gbit"))
        mount = ["mount", "--bind", "/etc/hosts", "/etc/hosts"]
        _output("ip", "netns", "exec", probe, "unshare", "--uts", "--mount", *mount)
    except subprocess.CalledProcessError as error:
        return f"the system does not allow it ({' '.join(error.cmd)}: {error.stderr.strip()})"
    finally:
        _remove_namespace(probe)
    return ""


def _ip(*words: str) -> None:
    _output("ip", *words)


def _output(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout
