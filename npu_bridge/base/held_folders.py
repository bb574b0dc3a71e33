"""Folders that one job at a time may use: a small lock file in them says which process holds the folder.

It works between hosts that share a file system, and a lock that a killed process has left is taken over: on the same
machine by looking for the process, from elsewhere by the age of the file, which its holder keeps young. One process
never refuses itself, nor do the ranks of one job refuse one another. Folders that are remote or cannot be written to
are not held.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import secrets
import socket
import threading
import time
from typing import Any, NamedTuple

from npu_bridge.base import environment
from npu_bridge.base.files import remove_text
from npu_bridge.base.terminal import logger

__all__ = ["BEAT_SECS", "SILENT_SECS", "FolderHeldError", "Hold", "hold_folder"]

_LOG = logger(__name__)
# The holder gives a sign of life as often as this; after so long without one it is taken for dead (ours).
BEAT_SECS, SILENT_SECS = 10.0, 60.0
_POLL_SECS = 0.5
_TAKEOVER = ".takeover"
_UNKNOWN = "unknown"  # when a process started that runs
_GUARD_TRIES = 200
# What tells jobs of several ranks apart, one for each launcher.
_JOBS = (("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"), ("PMIX_NAMESPACE",), ("PMI_JOBID",))


class FolderHeldError(RuntimeError):
    """Another job uses the folder; the message says which, since when, and what to do."""


class _Owner(NamedTuple):
    """Who wrote a lock file, and how long ago, in seconds, it last gave a sign of life."""

    facts: dict[str, Any]
    text: str
    silent_secs: float
    modified: float


class _Lock:
    """A lock file of this process."""

    def __init__(self, path: str, text: str, last_sign: float | None = None):
        self.path, self.text, self.last_sign = path, text, last_sign
        self.count, self.is_lost = 0, False
        self._process, self._mutex, self._is_released, self._seen_at = os.getpid(), threading.Lock(), False, _now()

    def give_sign(self) -> None:
        """Keeps the file young, and puts it back when it was removed; notices once when it is somebody else's."""
        if self.is_lost or not self.text:
            return
        with contextlib.suppress(OSError):
            now = _now()
            # Of a file that is gone after a silence nobody knows: another job may have come, and ended since.
            was_silent = now - self._seen_at > SILENT_SECS
            if not was_silent:
                self._put_back()
            found = _read_text(self.path)
            if found != self.text and (found or was_silent):
                self.is_lost = True  # for good: the other thread that looks may have looked before
                _LOG.error("%s is no longer this process's: another job has taken the folder.", self.path)
                return
            self._seen_at = now
            os.utime(self.path)

    def _put_back(self) -> None:
        """Makes the file again that somebody has cleaned away, unless another job comes first."""
        if self._process != os.getpid() or os.path.lexists(self.path):
            return
        with self._mutex, contextlib.suppress(FileNotFoundError):  # the folder is gone, too
            if not self._is_released:
                own = _name_beside(self.path)
                try:
                    _write_new(own, self.text)
                    _place(own, self.path, self.text)
                finally:
                    _remove(own, self.text)

    def remove(self) -> None:
        """Removes the file, for good."""
        with self._mutex:
            self._is_released = True
            _remove(self.path, self.text)


class Hold:
    """A folder that this process holds, until `release` or its end.

    Attributes:
      is_first: this process did not hold it already.
      has_taken_over: the process that held it before is known to be dead, and had not released it.
      last_sign: when that process gave its last sign of life, in seconds by the clock of the file system; else None.
    """

    def __init__(self, lock: _Lock | None):
        self._lock = lock
        self.is_first = lock is None or lock.count == 1
        self.last_sign = None if lock is None else lock.last_sign
        self.has_taken_over = self.last_sign is not None

    def release(self) -> None:
        """Gives the folder back; a second time does nothing."""
        lock, self._lock = self._lock, None
        if lock is not None:
            _HELD.release(lock)

    def check(self) -> None:
        """Sees that the folder is still held, say after the process was suspended.

        Raises:
          FolderHeldError: another job has taken it over.
        """
        if self._lock is not None:
            self._lock.give_sign()
            if self._lock.is_lost:
                raise FolderHeldError(
                    f"{os.path.dirname(self._lock.path)} was taken over by another job, because {self._lock.path} was "
                    f"removed, or this one gave no sign of life for {SILENT_SECS:.0f} s. Choose another folder, or "
                    f"stop the other job first."
                )

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def hold_folder(folder: str, purpose: str, what: str) -> Hold:
    """Holds a folder for this process; what it holds already is counted.

    Args:
      folder: which is there; a URL is not held.
      purpose: name of the lock file, without its ending; those of different purposes do not exclude each other.
      what: what this process does there, for the message to others.
    Raises:
      FolderHeldError: another job holds it.
    """
    if "://" in folder or not os.path.isdir(folder):
        return Hold(None)
    return Hold(_HELD.take(os.path.join(os.path.realpath(folder), f".{purpose}.lock"), what))


class _Held:
    """All locks of this process, and the thread that keeps them young."""

    def __init__(self):
        self._locks: dict[str, _Lock] = {}
        self._mutex = threading.RLock()
        self._process = 0
        self._thread: threading.Thread | None = None

    def take(self, path: str, what: str) -> _Lock | None:
        with self._mutex:
            self._forget_those_of_the_parent()
            lock = self._locks.get(path)
            if lock is None:
                lock = _acquire(path, what)
                if lock is None:
                    return None
                self._locks[path] = lock
                self._keep_young()
            lock.count += 1
            return lock

    def release(self, lock: _Lock) -> None:
        with self._mutex:
            if self._process != os.getpid():
                return
            lock.count -= 1
            if lock.count == 0 and self._locks.get(lock.path) is lock:
                del self._locks[lock.path]
                lock.remove()

    def release_all(self) -> None:
        """At the end of the process."""
        if self._process == os.getpid():
            for lock in list(self._locks.values()):
                lock.remove()
            self._locks.clear()

    def _forget_those_of_the_parent(self):
        if self._process != os.getpid():
            if self._process == 0:
                atexit.register(self.release_all)
            self._process, self._locks, self._thread = os.getpid(), {}, None

    def _keep_young(self):
        if self._thread is None:
            self._thread = threading.Thread(target=self._beat, name="npu_bridge-held-folders", daemon=True)
            self._thread.start()

    def _beat(self):
        while self._process == os.getpid():
            time.sleep(BEAT_SECS)
            for lock in list(self._locks.values()):
                lock.give_sign()


_HELD = _Held()


def _acquire(path: str, what: str) -> _Lock | None:
    """Makes the lock file; None where no file can be made."""
    text = json.dumps({**_this_process(), "what": what, "token": secrets.token_hex(8)})
    own = _name_beside(path)
    try:
        _write_new(own, text)
    except OSError as error:
        _LOG.debug("%s: not held (%s).", path, error)
        with contextlib.suppress(OSError):
            remove_text(own, _read_text(own))
        return None
    try:
        return _acquire_with(path, own, text)
    except OSError as error:  # somebody else's file, say, in a folder where only owners remove theirs
        _LOG.debug("%s: not held (%s).", path, error)
        return None
    finally:
        _remove(own, text)


def _acquire_with(path: str, own: str, text: str) -> _Lock | None:
    own_job = json.loads(text)["job"]
    for _ in range(_GUARD_TRIES):
        if _place(own, path, text):
            return _Lock(path, text)
        owner = _owner_of(path, own)
        if owner is None:
            continue  # it was released this moment
        if own_job and owner.facts.get("job") == own_job and not _is_gone(owner) and owner.silent_secs < SILENT_SECS:
            return _Lock(path, "")  # another rank holds it for all of them
        if _is_alive(owner, path, own):
            raise FolderHeldError(_explain(owner, os.path.dirname(path)))
        if _take_over(path, own, text, owner):
            _LOG.info("%s: taken over from %s.", os.path.dirname(path), _name_of(owner.facts))
            return _Lock(path, text, owner.modified)
        time.sleep(0.01)
    raise FolderHeldError(
        f"{os.path.dirname(path)} cannot be held: others try the same all the time. Start the jobs one after the other."
    )


def _take_over(path: str, own: str, text: str, dead: _Owner) -> bool:
    """Removes a dead process's lock and makes one, while nobody else does; False to look again."""
    guard = f"{path}{_TAKEOVER}"
    if not _place(own, guard, text):
        other = _owner_of(guard, own)
        if other is not None and (_is_gone(other) or other.silent_secs > SILENT_SECS):
            _remove(guard, other.text)
        return False
    try:
        return remove_text(path, dead.text) and _place(own, path, text)
    finally:
        _remove(guard, text)


def _place(own: str, path: str, text: str) -> bool:
    """Gives a file with this text a name that nobody has; False if somebody has it."""
    try:
        os.link(own, path)
        return True
    except FileExistsError:
        return _read_text(path) == text  # a file server whose first answer was lost says so of our own link
    except OSError:  # a file system without links: for a moment the file is there and empty
        try:
            _write_new(path, text)
            return True
        except FileExistsError:
            return False


def _name_beside(path: str) -> str:
    return f"{path}.{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}"


def _write_new(path: str, text: str) -> None:
    with open(path, "x", encoding="utf-8") as file:
        file.write(text)


def _now() -> float:
    """Seconds that go on while the machine or this process is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def _owner_of(path: str, own: str) -> _Owner | None:
    """Who wrote a lock; ages are by the clock of the file system, which has just dated `own`."""
    try:
        os.utime(own)
        with open(path, encoding="utf-8", errors="replace") as file:  # opening asks a file server anew
            text, modified = file.read(), os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return None
    try:
        facts = json.loads(text)
        facts = facts if isinstance(facts, dict) else {}
    except ValueError:
        facts = {}
    return _Owner(facts, text, os.stat(own).st_mtime - modified, modified)


def _is_alive(owner: _Owner, path: str, own: str) -> bool:
    """Whether who holds a lock still runs; of a process elsewhere the next sign of life is waited for."""
    if owner.facts.get("machine") == _machine() and owner.facts.get("host") == socket.gethostname():
        return not _is_gone(owner)
    seen: _Owner | None = owner
    if owner.silent_secs < SILENT_SECS:
        _LOG.warning("%s: waiting for a sign of life of %s.", os.path.dirname(path), _name_of(owner.facts))
    while seen is not None and seen.text == owner.text and seen.silent_secs < SILENT_SECS:
        if seen.modified != owner.modified:
            return True
        time.sleep(_POLL_SECS)
        seen = _owner_of(path, own)
    return False  # or another one's by now, which is found out when it is to be taken over


def _is_gone(owner: _Owner) -> bool:
    """Whether a process of this machine has ended, or its number is another one's now."""
    if owner.facts.get("machine") != _machine() or owner.facts.get("host") != socket.gethostname():
        return False
    process = owner.facts.get("process")
    return not isinstance(process, int) or _start_of(process) not in (owner.facts.get("started"), _UNKNOWN)


def _this_process() -> dict[str, Any]:
    jobs = (tuple(map(environment.read_variable, names)) for names in _JOBS)
    return {
        "host": socket.gethostname(),
        "machine": _machine(),
        "process": os.getpid(),
        "started": _start_of(os.getpid()),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "job": next((":".join(found) for found in jobs if all(found)), ""),
    }


def _machine() -> str:
    """What tells apart machines of one name, starts of one machine, and containers on it."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()}:{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _start_of(process: int) -> str | None:
    """When a process started, in the kernel's words; None for one that has ended."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        pass  # there is no such process, or no such file, or it is hidden from other users
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return None
    except OSError:
        pass
    return _UNKNOWN


def _name_of(facts: dict[str, Any]) -> str:
    return f"process {_shown(facts, 'process')} on {_shown(facts, 'host')}"


def _shown(facts: dict[str, Any], key: str) -> str:
    """What a lock file says, if it is words and numbers only: anybody can write one, and people copy what they read."""
    text = str(facts.get(key))
    return text if re.fullmatch(r"[\w.: -]{1,100}", text) else "unknown"


def _explain(owner: _Owner, folder: str) -> str:
    facts, process, host = owner.facts, _shown(owner.facts, "process"), _shown(owner.facts, "host")
    stop = f"kill {process}" if host == socket.gethostname() else f"ssh {host} kill {process}"
    known = f" ({stop})" if process.isdigit() else ""
    return (
        f"{folder} is in use. Expected a folder that no other job uses; got {_shown(facts, 'what')}, "
        f"{_name_of(facts)}, since {_shown(facts, 'since')}. Wait for its end, stop it{known}, or name another folder."
    )


def _read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def _remove(path: str, text: str) -> None:
    """Removes a file of ours; what cannot be removed is taken over by the next one."""
    if not text:
        return
    with contextlib.suppress(OSError):
        remove_text(path, text)
