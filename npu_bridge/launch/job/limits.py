"""Limits of the system that jobs of many ranks meet: on open files, and on processes of a user."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator, Sequence
from typing import Any

from npu_bridge.launch.errors import LaunchError

__all__ = ["FILES_OF_A_RANK", "Limit", "allow_files", "allow_open_files", "describe_no_process", "restore_open_files"]

# For the libraries of Horovod, connections to hosts, and what was open before (ours).
_OTHER_FILES = 64
# Its output, its errors and its link; a connection to a host has as many.
FILES_OF_A_RANK = 3

Limit = tuple[int, int]


@contextlib.contextmanager
def allow_open_files(count: int, what: str) -> Iterator[Limit | None]:
    """In this block, this process may open so many files, and some for itself.

    Args:
      count: of files.
      what: needs them, for messages.
    Yields:
      The limit as the user has set it, for processes that are started here; None where it was not changed.
    Raises:
      LaunchError: the system does not allow that.
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
            f"{what} need {needed} open files here. Expected a limit of at least that; got {hard} (ulimit -Hn). Raise "
            f"it as root, ulimit -n {needed}, or start fewer ranks on this machine."
        ) from error
    try:
        yield soft, hard
    finally:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def restore_open_files(process: int, limit: Limit | None) -> None:
    """Gives a process that was just started the user's own limit, where `allow_open_files` has changed this one's."""
    if limit is not None:
        with contextlib.suppress(OSError):  # it may be gone
            resource.prlimit(process, resource.RLIMIT_NOFILE, limit)


def describe_no_process(error: OSError) -> str:
    """The sentence about a process that the system does not start for want of room for one more."""
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    most = "no limit" if soft == resource.RLIM_INFINITY else soft
    return (
        f"one more rank cannot be started ({os.strerror(error.errno or 0)}). Expected room for its process; got ulimit "
        f"-u {most}, or the limit of a container. Raise it, or start fewer ranks on this machine."
    )


def allow_files(slots: Sequence[Any], log_dir: str | None) -> contextlib.AbstractContextManager[Limit | None]:
    """Allows for the open files of a job: all ranks ask the server and may have a log, those here have channels."""
    here, hosts = sum(not slot.host for slot in slots), len({slot.host for slot in slots})
    count = FILES_OF_A_RANK * (here + hosts) + (1 + bool(log_dir)) * len(slots)
    return allow_open_files(count, f"{len(slots)} ranks")
