"""Makes folders in memory that outlive the processes which write there: for state from which a job resumes.

The maker holds a folder with a lock that the kernel releases when the process dies. The next maker removes the folder
of a killed process after an hour: until then the job might be restarting.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator

from npu_bridge.base.environment import MEMORY_FOLDER, read_variable, write_variable
from npu_bridge.base.files import remove_own

_ROOT = "/dev/shm"
_LOCK = ".lock"
_KEPT_SECS = 3600.0


class MemoryFolder:
    """A folder that this process holds until `close`.

    Attributes:
      path: its path; only this user can read it.
    """

    def __init__(self, path: str, lock: int):
        self.path, self._lock, self._process = path, lock, os.getpid()

    def close(self, keeps: bool = False) -> None:
        """Removes the folder and its files, or keeps them for the next holder; calling it again has no effect."""
        lock, self._lock = self._lock, -1
        if lock < 0 or self._process != os.getpid():  # a forked process holds nothing
            return
        if not keeps:
            _remove(self.path)
        os.close(lock)


def make_memory_folder(name: str = "") -> MemoryFolder | None:
    """Makes a folder in memory; takes over a folder of that name without a holder, with its files.

    Args:
      name: letters and digits; by default a new name.
    Returns:
      None if there is no place for it, or another process holds the folder.
    """
    prefix = f"npu_bridge-{os.getuid()}-"
    path = os.path.join(_ROOT, prefix + (name or secrets.token_hex(8)))
    try:
        _remove_leftovers(prefix, but=path)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        lock = _take(path)
    except OSError:
        return None
    return None if lock is None else MemoryFolder(path, lock)


@contextlib.contextmanager
def for_job() -> Iterator[None]:
    """Lets the processes of this job, also on other hosts, keep state in a folder in memory during the block."""
    folder = make_memory_folder()
    if folder is None:
        yield
        return
    write_variable(MEMORY_FOLDER, folder.path)
    try:
        yield
    finally:
        folder.close()


def name_of(path: str) -> str:
    """Returns the name with which `make_memory_folder` made a folder, here or on another machine."""
    return os.path.basename(path).rpartition("-")[2]


def is_kept_by_job() -> bool:
    """Returns whether this job's processes keep state in memory; the same on all ranks, even without a folder."""
    return read_variable(MEMORY_FOLDER) is not None


def folder_of_job() -> str | None:
    """Returns this job's folder in memory; None if the launcher does not restart the job."""
    path = read_variable(MEMORY_FOLDER)
    return path if path is not None and _is_own(path) else None


def free_bytes(path: str) -> int:
    """Returns how many bytes can be written to the file system of a folder."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def _take(path: str) -> int | None:
    """Holds a folder; returns the descriptor of the lock, or None if another process holds it."""
    if not _is_own(path):
        return None
    lock = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    os.utime(path)
    return lock


def _is_own(path: str) -> bool:
    """Returns whether it is a folder of this user, closed to all others."""
    with contextlib.suppress(OSError):
        found = os.lstat(path)
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return False


def _remove_leftovers(prefix: str, but: str) -> None:
    for name in os.listdir(_ROOT):
        path = os.path.join(_ROOT, name)
        if not name.startswith(prefix) or path == but:
            continue
        with contextlib.suppress(OSError):
            if time.time() - os.stat(path).st_mtime > _KEPT_SECS:
                lock = _take(path)
                if lock is not None:
                    _remove(path)
                    os.close(lock)


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        remove_own(path, lambda each, found: found.st_uid == os.getuid())
