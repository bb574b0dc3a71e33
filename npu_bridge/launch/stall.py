"""When ranks wait for each other in vain: the rule and the words, apart from the processes they are about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from npu_bridge.launch.first_failure import Ending

__all__ = ["STALL_EXIT_CODE", "WARN_SECS", "Still", "describe_stall", "waiting_since"]

# As timeout(1) ends.
STALL_EXIT_CODE = 124
# When to speak of a standstill in a job that is not to be ended because of it; Horovod's own default.
WARN_SECS = 60.0
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
    """

    since: float
    where: str
    waits: bool


def waiting_since(stills: Mapping[int, Still | None]) -> float | None:
    """Since when the longest waiting rank has been waiting inside TensorFlow or Horovod; None when none does."""
    return min((still.since for still in stills.values() if still is not None and still.waits), default=None)


def describe_stall(
    stills: Mapping[int, Still | None], endings: Sequence[Ending], stopped: Sequence[int], secs: float
) -> str:
    """One line: how long nothing has moved, which ranks wait, for what, and which are missing.

    Args:
      stills: of every rank that runs; None for one that moves, as far as it is known.
      endings: of ranks that have ended, because they were done or because Horovod was shut down under them.
      stopped: ranks whose process is stopped (SIGSTOP, Ctrl-Z, a debugger).
      secs: how long the standstill has lasted.
    """
    ended = {ending.rank: ending for ending in endings}
    ranks_by_words: dict[str, list[int]] = {}
    for rank in sorted({*stills, *ended}):
        words = _words(stills.get(rank), ended.get(rank), rank in stopped)
        ranks_by_words.setdefault(words, []).append(rank)
    parts = [f"{_names(ranks)} {words}" for words, ranks in ranks_by_words.items()]
    return f"no progress for {secs:.0f} s: {'; '.join(parts)}. {_CAUSES}"


def _words(still: Still | None, ending: Ending | None, is_stopped: bool) -> str:
    if is_stopped:
        return "missing, its process is stopped"
    if still is None:
        return "missing, it has ended" if ending is not None and ending.exit_code == 0 else "missing, it is elsewhere"
    if not still.waits:
        return f"missing, it stays at {still.where}"
    if ending is not None and ending.tensor:
        return f"waiting for {ending.tensor} at {still.where}"
    return f"waiting at {still.where}"


def _names(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
