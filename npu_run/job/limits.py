"""Handles system limits that jobs with many ranks reach: on open files, and on processes of a user."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator, Sequence
from typing import Any

from npu_run.errors import LaunchError

# For Horovod's libraries, connections to hosts, and files that were open before (our own count).
_OTHER_FILES = 64
# A rank's output, errors and link; a connection to a host also has three.
FILES_OF_A_RANK = 3

Limit = tuple[int, int]


@contextlib.contextmanager
def raise_open_file_limit(count: int, purpose: str) -> Iterator[Limit | None]:
    """Raises this process's limit on open files during a block, with a reserve for the process itself.

    Args:
      count: number of files.
      purpose: the owners of the files, for messages ("8 ranks").
    Yields:
      The user's original limit, for processes started in the block; None if the limit was not changed.
    Raises:
      LaunchError: the system does not allow so many.
    """
    needed = count + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        yield None
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    except (ValueError, OSError) as error:
        raise LaunchError(
            f"{purpose} need {needed} open files here. Expected a limit (ulimit -Hn) of at least {needed}; got {hard}. "
            f"Raise the limit as root, ulimit -n {needed}, or start fewer ranks on this machine."
        ) from error
    try:
        yield soft, hard
    finally:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def restore_open_file_limit(process: int, limit: Limit | None) -> None:
    """Restores the user's original limit in a new process; `limit` is the result of `raise_open_file_limit`."""
    if limit is not None and hasattr(resource, "prlimit"):  # only Linux has it; elsewhere the higher limit stays
        with contextlib.suppress(OSError):  # it can have ended already
            resource.prlimit(process, resource.RLIMIT_NOFILE, limit)


def describe_process_limit(error: OSError) -> str:
    """Returns the message for a process that cannot start because of a limit on processes."""
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    most = "no limit" if soft == resource.RLIM_INFINITY else soft
    return (
        f"one more rank cannot be started ({os.strerror(error.errno or 0)}). Expected room for its process; got ulimit "
        f"-u {most}, or the limit of a container. Raise it, or start fewer ranks on this machine."
    )


def allow_open_files_of_job(
    slots: Sequence[Any], log_dir: str | None
) -> contextlib.AbstractContextManager[Limit | None]:
    """Allows the open files of a job: a connection and a log for each rank, pipes for each local rank and host."""
    here, hosts = sum(not slot.host for slot in slots), len({slot.host for slot in slots})
    count = FILES_OF_A_RANK * (here + hosts) + (1 + bool(log_dir)) * len(slots)
    return raise_open_file_limit(count, f"{len(slots)} ranks")
