"""Runs a barrier of ranks, where ranks start or make groups, with a time limit; the error names the missing ranks."""

from __future__ import annotations

import atexit
import contextlib
import threading
from typing import Any, Callable

from npu_bridge.base import environment
from npu_bridge.base.terminal import logger
from npu_bridge.collective.rendezvous.key_value_store import KeyValueStore

DEFAULT_LIMIT_SECS = 120
# When to warn about missing ranks, as `npu-run` does for all waits: after this time, or half of the limit.
_WARN_SECS = 60.0
_END_SECS = 5.0
_LOG = logger(__name__)


class RanksMissingError(RuntimeError):
    """An error for ranks that did not reach a barrier."""


def max_wait_secs() -> int:
    """Returns how many seconds ranks wait for each other: `HCCL_CONNECT_TIMEOUT`, by default 120.

    Raises:
      ValueError: the variable is not a positive whole number.
    """
    return environment.read_positive_number("HCCL_CONNECT_TIMEOUT", DEFAULT_LIMIT_SECS, "seconds")


def run_barrier(
    run_collective: Callable[[], Any],
    exchange_name: str,
    rank: int,
    size: int,
    give_up: Callable[[], Any],
    group_text: str = "its group",
) -> Any:
    """Runs a collective that returns only when every rank runs it; returns the collective's result.

    After 60 seconds, or half of the time limit, a line names the missing ranks.

    Args:
      run_collective: runs the collective. A waiting collective cannot be cancelled, so it runs in a separate thread,
        which is left behind after the time limit.
      exchange_name: a name for this barrier, unique in the job.
      give_up: makes a waiting collective fail; called at exit if a thread was left behind.
      group_text: words for the groups that this rank makes, for messages.
    Raises:
      RanksMissingError: the time limit has passed, or a missing rank has ended.
    """
    limit, store = max_wait_secs(), KeyValueStore(exchange_name)

    def find_missing():
        with contextlib.suppress(OSError):  # the store is gone when a job is ending
            return store.find_missing_ranks(size)
        return []

    try:
        store.put(rank)
    except OSError as error:  # after a restart of Horovod, the store is in rank 0, which can have ended
        text = describe_missing_ranks([], group_text, "before the job's key-value store ended")
        raise RanksMissingError(text) from error
    outcome: dict[str, Any] = {}

    def run():
        try:
            outcome["value"] = run_collective()
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=run, name=exchange_name, daemon=True)
    thread.start()
    first_secs = min(_WARN_SECS, limit / 2)
    thread.join(first_secs)
    if thread.is_alive():
        since = f"for {first_secs:g} of {limit} seconds"
        _LOG.warning("%s", describe_missing_ranks(find_missing(), group_text, since))
        thread.join(min(limit - first_secs, threading.TIMEOUT_MAX))
    if thread.is_alive():
        atexit.register(_end_thread, thread, give_up)
        raise RanksMissingError(describe_missing_ranks(find_missing(), group_text, f"within {limit} seconds"))
    if "error" in outcome:
        absent = find_missing()
        if absent:
            text = describe_missing_ranks(absent, group_text, "before the call failed")
            raise RanksMissingError(text) from outcome["error"]
        raise outcome["error"]
    return outcome["value"]


def _end_thread(thread, give_up):
    """Ends a thread before Python exits: a thread that returns from TensorFlow during the exit aborts the process."""
    give_up()
    thread.join(_END_SECS)


def describe_missing_ranks(missing: list[int], group_text: str, since: str) -> str:
    """Returns the message about ranks missing from `create_group`; `group_text` names the groups, `since` the time."""
    who = f"rank {', '.join(map(str, missing))}" if missing else "some rank"
    return (
        f"hccl.create_group: not every rank takes part in making {group_text}. Expected a call of create_group or "
        f"create_group_of_others on each rank; got no call from {who} {since}. Add the missing call "
        f"(create_group_of_others on a rank outside of the group), or raise HCCL_CONNECT_TIMEOUT."
    )
