"""When ranks wait for each other in vain: the rule and the words, apart from the processes they are about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from npu_bridge.launch.first_failure import Ending, names_of

__all__ = [
    "DEFAULT_STALL_SECS",
    "STALL_EXIT_CODE",
    "WARN_SECS",
    "Place",
    "Still",
    "describe_stall",
    "idle_since",
    "waiting_since",
]

# As timeout(1) ends.
STALL_EXIT_CODE = 124
# When to speak of a standstill in a job that is not to be ended because of it; Horovod's own default.
WARN_SECS = 60.0
# When a job ends in which nobody does anything any more, if nothing else was said.
DEFAULT_STALL_SECS = 600.0
_CAUSES = (
    "Usual causes: code that only some ranks run, unequal numbers of batches, graphs that differ, or one slow or "
    "stopped rank."
)


class Still(NamedTuple):
    """Where a rank stands still.

    Attributes:
      since: seconds on the monotonic clock.
      where: file and line of the script.
      waits: it is inside TensorFlow or Horovod, where a rank waits for others.
      busy_at: when its threads were last seen to compute meanwhile, those of Horovod apart; same clock.
      pipeline: file and line where its input pipeline is, if that is Python code and at work.
    """

    since: float
    where: str
    waits: bool
    busy_at: float = 0.0
    pipeline: str = ""


class Place(NamedTuple):
    """Where a rank is, standing still or not; fields as of `Still`."""

    where: str
    pipeline: str = ""


def waiting_since(stills: Mapping[int, Still | None]) -> float | None:
    """Since when the longest waiting rank has been waiting inside TensorFlow or Horovod; None when none does."""
    return min((still.since for still in stills.values() if still is not None and still.waits), default=None)


def idle_since(stills: Mapping[int, Still | None], stopped: Sequence[int]) -> float | None:
    """Since when every rank has been waiting and none has computed anything; None while one may yet go on.

    A rank that stays in a call of its own, such as a download, may go on. So may one that computes: a single run can
    hold hours of training steps.
    """
    since = 0.0
    for rank, still in stills.items():
        if rank in stopped:
            continue
        if still is None or not still.waits:
            return None
        since = max(since, still.since, still.busy_at)
    return since or None


def describe_stall(
    stills: Mapping[int, Still | None],
    endings: Sequence[Ending],
    stopped: Sequence[int],
    secs: float,
    places: Mapping[int, Place | None] | None = None,
) -> str:
    """One line: how long nothing has moved, which ranks wait, for what, and which are missing.

    Args:
      stills: of every rank that runs; None for one that moves, as far as it is known.
      endings: of ranks that have ended, because they were done or because Horovod was shut down under them.
      stopped: ranks whose process is stopped (SIGSTOP, Ctrl-Z, a debugger).
      secs: how long the standstill has lasted.
      places: where ranks are, of those that have answered.
    """
    ended = {ending.rank: ending for ending in endings}
    ranks_by_words: dict[str, list[int]] = {}
    for rank in sorted({*stills, *ended}):
        words = _words(stills.get(rank), ended.get(rank), rank in stopped, (places or {}).get(rank))
        ranks_by_words.setdefault(words, []).append(rank)
    parts = [f"{names_of(ranks)} {words}" for words, ranks in ranks_by_words.items()]
    return f"no progress for {secs:.0f} s: {'; '.join(parts)}. {_CAUSES}"


def _words(still: Still | None, ending: Ending | None, is_stopped: bool, place: Place | None) -> str:
    has_waited = still is not None and still.waits
    if is_stopped:
        return "missing, its process is stopped"
    where = still.where if still is not None else place.where if place is not None else ""
    if where and ending is not None and ending.is_echo and ending.tensor:
        return f"waiting for {ending.tensor} at {where}"
    pipeline = (still.pipeline if still is not None else "") or (place.pipeline if place is not None else "")
    if pipeline:
        return f"is in its input pipeline ({pipeline})"
    if has_waited:
        # Horovod was shut down under those that wait in it, and they have said so.
        is_busy = ending is None and still.busy_at > still.since
        return f"missing, it computes inside TensorFlow at {still.where}" if is_busy else f"waiting at {still.where}"
    if still is not None:
        return f"missing, it stays at {still.where}"
    if ending is not None and ending.exit_code == 0:
        return "missing, it has ended"
    return f"missing, it is at {where}" if where else "missing, it is elsewhere"
