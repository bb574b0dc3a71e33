"""A barrier of all ranks with a time limit, which names the ranks that did not come."""

from __future__ import annotations

import atexit
import threading
from typing import Any, Callable

from npu_bridge.collective.key_value_store import KeyValueStore
from npu_bridge.options import environment

DEFAULT_LIMIT_SECS = 120
_END_SECS = 5.0


class RanksMissingError(RuntimeError):
    """Not every rank came to a point that all ranks must reach."""


def limit_secs() -> int:
    """How long ranks wait for each other: `HCCL_CONNECT_TIMEOUT` in seconds, 120 when unset.

    Raises:
      ValueError: the variable is not a positive whole number.
    """
    return environment.positive_number("HCCL_CONNECT_TIMEOUT", DEFAULT_LIMIT_SECS, "seconds")


def meet(together: Callable[[], Any], meeting: str, rank: int, size: int, give_up: Callable[[], Any]) -> Any:
    """Runs a collective that returns only when every rank runs it, and gives what it returned.

    Args:
      together: the collective. One that waits cannot be cancelled, so it runs in a thread of its own, which is left
        behind when the time is over.
      meeting: a name for this barrier, unique in the job.
      give_up: makes a collective that still waits fail; called at exit where one was left behind.
    Raises:
      RanksMissingError: the time is over.
    """
    limit, store = limit_secs(), KeyValueStore(meeting)
    store.put(rank)
    outcome: dict[str, Any] = {}

    def run():
        try:
            outcome["value"] = together()
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=run, name=meeting, daemon=True)
    thread.start()
    thread.join(min(limit, threading.TIMEOUT_MAX))
    if thread.is_alive():
        atexit.register(_end, thread, give_up)
        raise missing_error(store.missing(size), limit)
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]


def _end(thread, give_up):
    """A thread that comes back from TensorFlow when Python is half gone would abort the process, error and all."""
    give_up()
    thread.join(_END_SECS)


def missing_error(missing: list[int], limit: int) -> RanksMissingError:
    """The error that names the ranks which did not come to make groups."""
    who = f"rank {', '.join(map(str, missing))}" if missing else "some rank"
    return RanksMissingError(
        f"hccl.create_group: not every rank takes part. Expected every rank to call create_group, or "
        f"create_group_of_others where it belongs to no group, the same number of times; got no call from {who} "
        f"within {limit} seconds. Add the call there, or raise HCCL_CONNECT_TIMEOUT."
    )
