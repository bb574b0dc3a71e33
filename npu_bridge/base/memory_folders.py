"""Makes folders in memory that outlive their writers, for state from which a job resumes.

The process that makes a folder holds a lock on it, which the kernel releases when the process dies. A later call
removes the folder of a killed process an hour after its last file was written; until then the job might be restarting.
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
from npu_bridge.base.files import remove_own_files, walk

_ROOT = "/dev/shm"
_LOCK = ".lock"
_KEPT_SECS = 3600.0


class MemoryFolder:
    """A folder in memory that this process holds until `close`.

    Attributes:
      path: the folder's path; only this user can read the folder.
    """

    def __init__(self, path: str, lock: int):
        self.path, self._lock, self._process = path, lock, os.getpid()

    def close(self, keeps_files: bool = False) -> None:
        """Removes the folder and its files, or keeps them for the next holder; calling it again has no effect."""
        lock, self._lock = self._lock, -1
        if lock < 0 or self._process != os.getpid():  # a forked process holds nothing
            return
        if not keeps_files:
            _remove_folder(self.path)
        os.close(lock)


def make_memory_folder(name: str = "") -> MemoryFolder | None:
    """Makes a folder in memory. An existing folder of that name is reused with its files, unless a process holds it.

    Args:
      name: letters and digits; by default a new name.
    Returns:
      The folder; None if it cannot be made, or another process holds it.
    """
    prefix = f"npu_bridge-{os.getuid()}-"
    path = os.path.join(_ROOT, prefix + (name or secrets.token_hex(8)))
    try:
        _remove_leftovers(prefix, kept_name=path)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        lock = _lock_folder(path)
    except OSError:
        return None
    return None if lock is None else MemoryFolder(path, lock)


@contextlib.contextmanager
def memory_folder_for_job() -> Iterator[None]:
    """Makes a folder in memory for the job's state during the block; the job's processes find it by a variable."""
    folder = make_memory_folder()
    if folder is None:
        yield
        return
    write_variable(MEMORY_FOLDER, folder.path)
    try:
        yield
    finally:
        folder.close()


def memory_folder_name(path: str) -> str:
    """Returns the name with which `make_memory_folder` made a folder, here or on another machine."""
    return os.path.basename(path).rpartition("-")[2]


def keeps_state_in_memory() -> bool:
    """Returns whether this job keeps state in memory; the result is the same on all ranks."""
    return read_variable(MEMORY_FOLDER) is not None


def folder_of_job() -> str | None:
    """Returns this job's folder in memory; None if the launcher made no such folder."""
    path = read_variable(MEMORY_FOLDER)
    return path if path is not None and _is_private_folder(path) else None


def free_bytes(path: str) -> int:
    """Returns how many bytes can be written to the file system of a folder."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def _lock_folder(path: str) -> int | None:
    """Locks a folder; returns the lock's file descriptor, or None if another process holds it."""
    if not _is_private_folder(path):
        return None
    lock = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    os.utime(path)
    return lock


def _is_private_folder(path: str) -> bool:
    """Returns whether a path is a folder of this user that no other user can open."""
    with contextlib.suppress(OSError):
        found = os.lstat(path)
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return False


def _remove_leftovers(prefix: str, kept_name: str) -> None:
    for name in os.listdir(_ROOT):
        path = os.path.join(_ROOT, name)
        if not name.startswith(prefix) or path == kept_name:
            continue
        with contextlib.suppress(OSError):
            if time.time() - max((found.st_mtime for _, found in walk(path)), default=time.time()) > _KEPT_SECS:
                lock = _lock_folder(path)
                if lock is not None:
                    _remove_folder(path)
                    os.close(lock)


def _remove_folder(path: str) -> None:
    with contextlib.suppress(OSError):
        remove_own_files(path, lambda each, found: found.st_uid == os.getuid())
