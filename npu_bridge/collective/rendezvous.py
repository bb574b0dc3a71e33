"""Runs a barrier of all ranks with a time limit, which names the ranks that did not come."""

from __future__ import annotations

import atexit
import contextlib
import threading
from typing import Any, Callable

from npu_bridge.base import environment
from npu_bridge.base.terminal import logger
from npu_bridge.collective.key_value_store import KeyValueStore

DEFAULT_LIMIT_SECS = 120
# When to warn about missing ranks, as `npu-run` does for all waits; half of the limit if that is less.
_WARN_SECS = 60.0
_END_SECS = 5.0
_LOG = logger(__name__)


class RanksMissingError(RuntimeError):
    """An error for a point that all ranks must reach and some did not."""


def limit_secs() -> int:
    """Returns how long ranks wait for each other: `HCCL_CONNECT_TIMEOUT` in seconds, 120 when unset.

    Raises:
      ValueError: the variable is not a positive whole number.
    """
    return environment.positive_number("HCCL_CONNECT_TIMEOUT", DEFAULT_LIMIT_SECS, "seconds")


def meet(
    together: Callable[[], Any], meeting: str, rank: int, size: int, give_up: Callable[[], Any], what: str = "its group"
) -> Any:
    """Runs a collective that returns only when every rank runs it, and returns its result.

    After 60 seconds, or half of the limit, a line names the ranks that have not come yet.

    Args:
      together: the collective. Since a waiting collective cannot be cancelled, it runs in its own thread, which is left
        behind when the time is over.
      meeting: a name for this barrier, unique in the job.
      give_up: makes a waiting collective fail; called at exit if a thread was left behind.
      what: the purpose of this rank, for messages.
    Raises:
      RanksMissingError: the time is over, or a missing rank has ended.
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
    first_secs = min(_WARN_SECS, limit / 2)
    thread.join(first_secs)
    if thread.is_alive():
        _LOG.warning("%s", not_here(store.missing(size), what, f"for {first_secs:g} of {limit} seconds"))
        thread.join(min(limit - first_secs, threading.TIMEOUT_MAX))
    if thread.is_alive():
        atexit.register(_end, thread, give_up)
        raise RanksMissingError(not_here(store.missing(size), what, f"within {limit} seconds"))
    if "error" in outcome:
        with contextlib.suppress(OSError):  # the store is gone when a job is ending
            absent = store.missing(size)
            if absent:
                raise RanksMissingError(not_here(absent, what, "before it ended")) from outcome["error"]
        raise outcome["error"]
    return outcome["value"]


def _end(thread, give_up):
    """Ends a thread before Python exits: if it returned from TensorFlow during the exit, the process would abort."""
    give_up()
    thread.join(_END_SECS)


def not_here(missing: list[int], what: str, since: str) -> str:
    """Returns the sentence that names the ranks which did not come to make groups."""
    who = f"rank {', '.join(map(str, missing))}" if missing else "some rank"
    return (
        f"hccl.create_group: not every rank takes part in making {what}. Expected every rank to call create_group, or "
        f"create_group_of_others where it belongs to no group, the same number of times; got no call from {who} "
        f"{since}. Add the call there, or raise HCCL_CONNECT_TIMEOUT."
    )
