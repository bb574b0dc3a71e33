"""Holds folders that only one job at a time can use: a small lock file in the folder names the process that holds it.

Locks work between hosts that share a file system. A running holder renews its lock file regularly. The lock of a killed
process is taken over: on the same machine as soon as the process is gone, on another machine once the file is too old.
A process can hold a folder several times, and the ranks of one job share their hold. Remote and read-only folders are
not locked. The package `filelock` does not fit: its locks name no holder, and its locks that work between hosts remain
when their holder is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import socket
import threading
import time

from npu_bridge.base import environment
from npu_bridge.base.files import remove_file_with_text
from npu_bridge.base.lock_owners import LockOwner, describe_this_process, read_owner
from npu_bridge.base.terminal import logger

_LOG = logger(__name__)
# Interval between the holder's signs of life, and the silence after which the holder counts as dead; chosen here.
BEAT_SECS, SILENT_SECS = 10.0, 60.0
# Name of the thread that gives the signs of life.
THREAD = "npu_bridge-held-folders"
_POLL_SECS = 0.5
_TAKEOVER = ".takeover"
_GUARD_TRIES = 200
# One lock for all: a hook that Python collects releases its folder, even in code that has the lock.
_MUTEX = threading.RLock()


class FolderHeldError(RuntimeError):
    """An error for a folder that another job uses; the message says which job, since when, and the cure."""


class _FolderLock:
    """A lock file of this process."""

    def __init__(self, path: str, text: str, last_sign: float | None = None, holder: int | None = None):
        self.path, self.text, self.last_sign, self.holder = path, text, last_sign, holder
        self.count, self.is_lost = 0, False
        self._process, self._is_released, self._seen_at = os.getpid(), False, _clock_secs()

    def renew(self) -> None:
        """Updates the lock file's time, and restores a removed file. Logs once that another job owns the file."""
        if self.is_lost or not self.text:
            return
        with contextlib.suppress(OSError):
            now = _clock_secs()
            # If the file is gone after a silence, another job might have come, and ended since.
            was_silent = now - self._seen_at > SILENT_SECS
            if not was_silent:
                self._restore_file()
            found = _read_text(self.path)
            if found != self.text and (found or was_silent):
                self.is_lost = True  # stays True: another thread might have checked just before
                _LOG.error("%s is no longer this process's: another job has taken the folder.", self.path)
                return
            self._seen_at = now
            os.utime(self.path)

    def _restore_file(self) -> None:
        """Restores the lock file if a cleanup removed it, unless another job makes one first."""
        if self._process != os.getpid() or os.path.lexists(self.path):
            return
        if not _MUTEX.acquire(blocking=False):  # held while a thread waits for a folder: the next renewal restores it
            return
        with contextlib.ExitStack() as stack, contextlib.suppress(FileNotFoundError):  # the folder is gone, too
            stack.callback(_MUTEX.release)
            if not self._is_released:
                own = _unique_name_beside(self.path)
                try:
                    _write_new_file(own, self.text)
                    _create_lock_file(own, self.path, self.text)
                finally:
                    _remove_lock_file(own, self.text)
            if self._is_released:  # perhaps just now, by garbage that Python has collected in this thread
                _remove_lock_file(self.path, self.text)

    def remove(self) -> None:
        """Removes the lock file for good: the thread that renews lock files does not write it again."""
        with _MUTEX:
            self._is_released = True
            _remove_lock_file(self.path, self.text)


class FolderHold:
    """A folder that this process holds until `release`, or until the process ends.

    Attributes:
      is_first: whether this process did not hold the folder before.
      has_taken_over: whether the previous holder died without releasing the folder.
      last_sign: time of the dead holder's last sign of life, in seconds by the file system's clock; else None.
      holder: the other rank of this job that already holds the folder; None if no other rank holds it.
    """

    def __init__(self, lock: _FolderLock | None):
        self._lock = lock
        self.is_first = lock is None or lock.count == 1
        self.last_sign = None if lock is None else lock.last_sign
        self.has_taken_over = self.last_sign is not None
        self.holder = None if lock is None else lock.holder

    def release(self) -> None:
        """Releases the folder; calling it again has no effect."""
        lock, self._lock = self._lock, None
        if lock is not None:
            _PROCESS_LOCKS.release(lock)

    def check_still_held(self) -> None:
        """Checks that the folder is still held, for example after the process was suspended.

        Raises:
          FolderHeldError: another job has taken over the folder.
        """
        if self._lock is not None:
            self._lock.renew()
            if self._lock.is_lost:
                raise FolderHeldError(
                    f"{os.path.dirname(self._lock.path)} was taken over by another job, because {self._lock.path} was "
                    f"removed, or this job gave no sign of life for {SILENT_SECS:.0f} s. Choose another folder, or "
                    f"stop the other job first."
                )

    def __enter__(self) -> FolderHold:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def hold_folder(folder: str, lock_name: str, holder_kind: str) -> FolderHold:
    """Locks a folder for this process. A folder that is held twice must be released twice.

    Args:
      folder: an existing folder; a URL is not locked.
      lock_name: name of the lock file, without its ending; locks with different names do not exclude each other.
      holder_kind: the kind of this holder, such as "a training", for the message to other jobs.
    Raises:
      FolderHeldError: another job holds the folder.
    """
    if "://" in folder or not os.path.isdir(folder):
        return FolderHold(None)
    return FolderHold(_PROCESS_LOCKS.acquire(os.path.join(os.path.realpath(folder), f".{lock_name}.lock"), holder_kind))


class _ProcessLocks:
    """All locks of this process, and the thread that renews them."""

    def __init__(self):
        self._locks: dict[str, _FolderLock] = {}
        self._process = 0
        self._thread: threading.Thread | None = None

    def acquire(self, path: str, holder_kind: str) -> _FolderLock | None:
        with _MUTEX:
            self._forget_parent_locks()
            lock = self._locks.get(path)
            if lock is None:
                lock = _acquire_lock(path, holder_kind)
                if lock is None:
                    return None
                self._locks[path] = lock
                self._start_renewing()
            lock.count += 1
            return lock

    def release(self, lock: _FolderLock) -> None:
        with _MUTEX:
            if self._process != os.getpid():
                return
            lock.count -= 1
            if lock.count == 0 and self._locks.get(lock.path) is lock:
                del self._locks[lock.path]
                lock.remove()

    def release_all(self) -> None:
        """Releases all locks at the end of the process."""
        if self._process == os.getpid():
            for lock in list(self._locks.values()):
                lock.remove()
            self._locks.clear()

    def _forget_parent_locks(self):
        if self._process != os.getpid():
            if self._process == 0:
                atexit.register(self.release_all)
            self._process, self._locks, self._thread = os.getpid(), {}, None

    def _start_renewing(self):
        if self._thread is None:
            self._thread = threading.Thread(target=self._renew_until_exit, name=THREAD, daemon=True)
            self._thread.start()

    def _renew_until_exit(self):
        while self._process == os.getpid():
            time.sleep(BEAT_SECS)
            for lock in list(self._locks.values()):
                lock.renew()


_PROCESS_LOCKS = _ProcessLocks()


def _acquire_lock(path: str, holder_kind: str) -> _FolderLock | None:
    """Makes the lock file; returns None if no file can be made in the folder."""
    text = json.dumps({**describe_this_process(), "what": holder_kind, "token": secrets.token_hex(8)})
    own = _unique_name_beside(path)
    try:
        _write_new_file(own, text)
    except OSError as error:
        _LOG.debug("%s: not held (%s).", path, error)
        with contextlib.suppress(OSError):
            remove_file_with_text(own, _read_text(own))
        return None
    try:
        return _acquire_or_take_over(path, own, text)
    except OSError as error:  # for example another user's file, in a folder where only owners remove theirs
        _LOG.debug("%s: not held (%s).", path, error)
        return None
    finally:
        _remove_lock_file(own, text)


def _acquire_or_take_over(path: str, own_file: str, text: str) -> _FolderLock | None:
    own_job = json.loads(text)["job"]
    for _ in range(_GUARD_TRIES):
        if _create_lock_file(own_file, path, text):
            return _FolderLock(path, text)
        owner = read_owner(path, own_file)
        if owner is None:
            continue  # the lock was released just now
        is_of_own_job = own_job and owner.facts.get("job") == own_job and not _is_other_process_of_own_rank(owner)
        if is_of_own_job and not owner.is_gone() and owner.silent_secs < SILENT_SECS:
            return _FolderLock(path, "", holder=owner.rank)  # this rank holds it for all ranks
        if _is_owner_alive(owner, path, own_file):
            raise FolderHeldError(owner.held_folder_message(os.path.dirname(path)))
        if _take_over_lock(path, own_file, text, owner):
            _LOG.info("%s: taken over from %s.", os.path.dirname(path), owner.name)
            return _FolderLock(path, text, owner.modified)
        time.sleep(0.01)
    raise FolderHeldError(
        f"{os.path.dirname(path)} cannot be locked: other jobs keep locking it. Start the jobs one after the other."
    )


def _is_other_process_of_own_rank(owner: LockOwner) -> bool:
    """Returns whether a lock's holder is another process of this rank; False if no rank is known."""
    return environment.launcher_placement() is not None and owner.rank == environment.probable_rank()


def _take_over_lock(path: str, own_file: str, text: str, dead_owner: LockOwner) -> bool:
    """Replaces a dead process's lock; returns False if another process might have replaced it first."""
    guard = f"{path}{_TAKEOVER}"
    if not _create_lock_file(own_file, guard, text):
        other = read_owner(guard, own_file)
        if other is not None and (other.is_gone() or other.silent_secs > SILENT_SECS):
            _remove_lock_file(guard, other.text)
        return False
    try:
        return remove_file_with_text(path, dead_owner.text) and _create_lock_file(own_file, path, text)
    finally:
        _remove_lock_file(guard, text)


def _create_lock_file(own_file: str, path: str, text: str) -> bool:
    """Links the file `own_file`, which contains `text`, to `path`; returns False if `path` exists."""
    try:
        os.link(own_file, path)
        return True
    except FileExistsError:
        return _read_text(path) == text  # after a lost answer, a file server reports our own link as existing
    except OSError:  # a file system without links: for a moment the file exists but is empty
        try:
            _write_new_file(path, text)
            return True
        except FileExistsError:
            return False


def _unique_name_beside(path: str) -> str:
    return f"{path}.{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}"


def _write_new_file(path: str, text: str) -> None:
    with open(path, "x", encoding="utf-8") as file:
        file.write(text)


def _clock_secs() -> float:
    """Returns the seconds of a clock that also runs while the machine or this process is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def _is_owner_alive(owner: LockOwner, path: str, own_file: str) -> bool:
    """Returns whether a lock's holder still runs; waits for a sign of life from a holder on another machine."""
    if owner.is_on_this_machine():
        return not owner.is_gone()
    if owner.is_from_earlier_start():
        return False
    seen: LockOwner | None = owner
    if owner.silent_secs < SILENT_SECS:
        _LOG.warning("%s: waiting for a sign of life from %s.", os.path.dirname(path), owner.name)
    while seen is not None and seen.text == owner.text and seen.silent_secs < SILENT_SECS:
        if seen.modified != owner.modified:
            return True
        time.sleep(_POLL_SECS)
        seen = read_owner(path, own_file)
    return False  # if another process has replaced the lock by now, taking it over fails


def _read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def _remove_lock_file(path: str, text: str) -> None:
    """Removes a file of this process; if that fails, the next holder takes over the file."""
    if not text:
        return
    with contextlib.suppress(OSError):
        remove_file_with_text(path, text)
