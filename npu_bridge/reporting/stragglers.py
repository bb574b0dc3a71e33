"""Compares the ranks' own work and waiting, and describes slow ranks: text and numbers only."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence

from npu_bridge.reporting.history import Comparison, History
from npu_bridge.reporting.progress_line import format_secs

PARTS = 5  # parts of a comparison; a slow rank is slow in each, so that a short disturbance does not count
_STEPS_OF_PART = 10
_START_UP_RUNS = 3  # in which TensorFlow prepares the graph for new sets of fetches
_SLOW, _SLOW_STILL = 1.2, 1.1  # times the median of the others; apart, so that a rank near the limit is named once
# Ours: smaller differences are not worth a change, and rank 0 has more to write than others.
_LEAST_SECS = 0.002


class OwnWork:
    """Adds up a rank's own work and its waiting, until there are enough steps to compare ranks by.

    Own work goes from the end of the reductions of the step before until this rank's last gradient is ready.
    """

    def __init__(self) -> None:
        self._done = 0.0
        self._runs, self._counts = 0, False
        self._begin()

    def _begin(self) -> None:
        self._own_secs = self._waiting_secs = 0.0  # of the current update
        self._steps_of_part: list[tuple[float, float]] = []  # seconds of own work and of waiting
        self._parts: list[tuple[float, ...]] = []  # their medians

    def add(self, ready: float, done: float, is_update: bool = True, steps: int = 1) -> list[float] | None:
        """Adds a run.

        Args:
          ready, done: when this rank's gradients were ready, and when the reductions ended, in seconds since the epoch.
          is_update: whether gradients were exchanged; else the batch is part of a later update.
          steps: steps of the run; the waiting of the last one stands for all.
        Returns:
          None, or what ranks compare: own work in each part, in seconds a step, and the share of waiting.
        """
        began, self._done, self._runs = self._done, done, self._runs + 1
        if not self._counts:
            self._counts = is_update and self._runs >= _START_UP_RUNS
            return None
        waiting = max(done - ready, 0.0) * steps
        self._waiting_secs += waiting
        self._own_secs += max(done - began - waiting, 0.0)
        if not is_update:
            return None
        self._steps_of_part += [(self._own_secs / steps, self._waiting_secs / steps)] * steps
        self._own_secs = self._waiting_secs = 0.0
        if len(self._steps_of_part) >= _STEPS_OF_PART:
            # Medians: a save on rank 0 does not make it slow, nor the others fast or waiting long.
            self._parts.append(tuple(map(statistics.median, zip(*self._steps_of_part))))
            self._steps_of_part = []
        if len(self._parts) < PARTS:
            return None
        own_secs, waiting_secs = zip(*self._parts)
        self._begin()
        return [*own_secs, sum(waiting_secs) / max(sum(own_secs + waiting_secs), 1e-9)]

    def resume(self, time: float) -> None:
        """Leaves out the time until now: a comparison makes early ranks wait for others, which is no work."""
        self._done = time


def compare(
    step: int, time: float, own_secs: Sequence[Sequence[float]], waiting: Sequence[float], slow: Collection[int]
) -> Comparison:
    """Finds the slow ranks.

    Args:
      step, time: step and time of the comparison.
      own_secs: for each rank its own work in a typical step of each part.
      waiting: for each rank the share of a typical step in which it has waited.
      slow: the ranks that were slow before.
    """
    found = []
    for rank, own in enumerate(own_secs):
        others = [statistics.median(_of_others(part, rank)) for part in zip(*own_secs)]
        if rank in slow:
            is_slow = sum(own) > _SLOW_STILL * sum(others)
        else:
            is_slow = all(one > max(_SLOW * other, other + _LEAST_SECS) for one, other in zip(own, others))
        found += [rank] if is_slow else []
    means = [statistics.fmean(own) for own in own_secs]
    return Comparison(step, time, [round(1000 * own, 3) for own in means], [round(each, 4) for each in waiting], found)


def say_changes(before: Comparison | None, now: Comparison) -> list[str]:
    """Returns a sentence for each rank that has become slow, and for each that has recovered."""
    known = before.slow if before else []
    said = [say_slow(now, rank) for rank in now.slow if rank not in known]
    return said + [f"rank {rank} is no longer slow: {_work(now, rank)}" for rank in known if rank not in now.slow]


def say_slow(found: Comparison, rank: int) -> str:
    """Describes how slow a rank is."""
    who = "they wait" if len(found.own_ms) > 2 else "it waits"
    return f"rank {rank} is slow: {_work(found, rank)}; {who} {lost_share(found, rank):.0%} of the time for it"


def say_all_slow(found: Comparison | None) -> str | None:
    """Describes the slow ranks in a few words, for a progress line; None without any."""
    if found is None or not found.slow:
        return None
    names = ", ".join(map(str, found.slow))
    lost = max(lost_share(found, rank) for rank in found.slow)
    return f"rank{'s' if len(found.slow) > 1 else ''} {names} slow, others wait {lost:.0%}"


def lost_share(found: Comparison, rank: int) -> float:
    """Returns the share of the time that the others wait for a rank: their median, less its own waiting."""
    return max(statistics.median(_of_others(found.waiting, rank)) - found.waiting[rank], 0.0)


def slowest(found: Comparison | None) -> dict[str, float]:
    """Returns the metrics to log of the rank with the most work, slow or not; empty before the first comparison."""
    if found is None:
        return {}
    rank = max(range(len(found.own_ms)), key=found.own_ms.__getitem__)
    others = statistics.median(_of_others(found.own_ms, rank))
    return {
        "slowest_rank": rank,
        "slowest_rank_own_ms": found.own_ms[rank],
        "other_ranks_own_ms": others,
        "waiting_for_slowest_rank": lost_share(found, rank),
    }


def spells(history: History) -> list[tuple[Comparison, int, int | None]]:
    """Lists when ranks were slow: the comparison that named a rank, the rank, and its step of recovery or None."""
    done: list[tuple[Comparison, int, int | None]] = []
    named: dict[int, Comparison] = {}
    for found in history.comparisons:
        done += [(named.pop(rank), rank, found.step) for rank in list(named) if rank not in found.slow]
        named.update((rank, found) for rank in found.slow if rank not in named)
    done += [(found, rank, None) for rank, found in named.items()]
    return sorted(done, key=lambda spell: (spell[0].step, spell[1]))


def _work(found, rank):
    others = statistics.median(_of_others(found.own_ms, rank))
    own, theirs = (format_secs(each / 1000) for each in (found.own_ms[rank], others))
    whose = f"that of the others {theirs} (median)" if len(found.own_ms) > 2 else f"that of the other {theirs}"
    return f"its own work takes {own} a step, {whose}"


def _of_others(values, rank):
    return [value for other, value in enumerate(values) if other != rank]
