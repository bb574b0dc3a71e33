"""Describes a lock file's owner: the facts that a process writes about itself, and whether it still runs."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import time
from typing import Any, NamedTuple

from npu_bridge.base import environment

# Variables that identify jobs of several ranks, one entry for each launcher.
_JOBS = (("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"), ("PMIX_NAMESPACE",), ("PMI_JOBID",))
_UNKNOWN = "unknown"  # the start time of a running process whose start cannot be read


class LockOwner(NamedTuple):
    """The process that wrote a lock file, with the seconds since its last sign of life."""

    facts: dict[str, Any]
    text: str
    silent_secs: float
    modified: float

    @property
    def name(self) -> str:
        """The process's name in messages."""
        return f"process {self._printable_field('process')} on {self._printable_field('host')}"

    @property
    def rank(self) -> int:
        """The process's rank in its job; -1 if the lock file does not contain it."""
        rank = self.facts.get("rank")
        return rank if isinstance(rank, int) else -1

    def is_on_this_machine(self) -> bool:
        """Returns whether the process was started on this machine, in this boot and container."""
        return self.facts.get("machine") == _machine_id() and self.facts.get("host") == socket.gethostname()

    def is_gone(self) -> bool:
        """Returns whether the process was on this machine and has ended; its number can be in use again."""
        process = self.facts.get("process")
        known = (self.facts.get("started"), _UNKNOWN)
        return self.is_on_this_machine() and (not isinstance(process, int) or _start_time_of(process) not in known)

    def is_from_earlier_start(self) -> bool:
        """Returns whether the process was a rank of an earlier start of this job, whose ranks have all ended."""
        job, number, still_running = _read_job_start()
        other_job, _, other = str(self.facts.get("start")).partition(":")
        if not job or other_job != job or not (other.isdecimal() and number.isdecimal()):
            return False
        # Only of an earlier start: this process itself can be left over, on a host that the launcher has lost.
        return int(other) < int(number) and other not in still_running.split(",")

    def held_folder_message(self, folder: str) -> str:
        """Returns the error message for a folder that the process described here holds."""
        process, host = self._printable_field("process"), self._printable_field("host")
        stop = f"kill {process}" if host == socket.gethostname() else f"ssh {host} kill {process}"
        known = f" ({stop})" if process.isdigit() else ""
        return (
            f"{folder} is in use. Expected a folder that no other job uses; got {self._printable_field('what')}, "
            f"{self.name}, since {self._printable_field('since')}. Wait for this job, stop it{known}, or name "
            "another folder."
        )

    def _printable_field(self, key):
        """Returns a field of the file; "unknown" for unusual characters, since any user can write a lock file."""
        text = str(self.facts.get(key))
        return text if re.fullmatch(r"[\w.: -]{1,100}", text) else "unknown"


class JobStarts:
    """The numbered starts of one job. A lock from an earlier, ended start is taken over without waiting."""

    def __init__(self):
        self._job, self._number, self._still_running = secrets.token_hex(8), 0, []

    def begin_start(self) -> None:
        """Begins a start of the job: ranks launched from now on get the number of this start from the environment."""
        self._number += 1
        environment.write_variable(environment.START, f"{self._job}:{self._number}:{','.join(self._still_running)}")

    def end_start(self, might_still_run: bool) -> None:
        """Ends a start. If `might_still_run`, some ranks can still run, so their locks are not taken over at once."""
        if might_still_run:
            self._still_running.append(str(self._number))


def read_owner(path: str, own_file: str) -> LockOwner | None:
    """Reads a lock file's owner; returns None if there is no such file.

    It touches the file `own_file` to learn the present time by the file system's clock.
    """
    try:
        os.utime(own_file)
        with open(path, encoding="utf-8", errors="replace") as file:  # opening refreshes a file server's cache
            text, modified = file.read(), os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return None
    try:
        facts = json.loads(text)
        facts = facts if isinstance(facts, dict) else {}
    except ValueError:
        facts = {}
    return LockOwner(facts, text, os.stat(own_file).st_mtime - modified, modified)


def describe_this_process() -> dict[str, Any]:
    """Returns the facts that this process writes into a lock file."""
    jobs = (tuple(map(environment.read_variable, names)) for names in _JOBS)
    return {
        "host": socket.gethostname(),
        "machine": _machine_id(),
        "process": os.getpid(),
        "rank": environment.probable_rank(),
        "started": _start_time_of(os.getpid()),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "start": ":".join(_read_job_start()[:2]),
        "job": next((":".join(found) for found in jobs if all(found)), ""),
    }


def _read_job_start() -> tuple[str, str, str]:
    job, number, still_running, *_ = (*(environment.read_variable(environment.START) or "").split(":"), "", "")
    return job, number, still_running


def _machine_id() -> str:
    """Returns a text that identifies this machine, its last boot, and this container."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()}:{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _start_time_of(process: int) -> str | None:
    """Returns the start time of a process in the kernel's units; None if the process has ended."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        pass  # no such process, no such file, or it is hidden from other users
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return None
    except OSError:
        pass
    return _UNKNOWN
