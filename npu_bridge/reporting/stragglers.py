"""Compares the own work and the waiting of ranks, and describes slow ranks in text and numbers."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence

from npu_bridge.reporting.history import Comparison, History
from npu_bridge.reporting.progress_line import format_secs

PARTS = 5  # parts of a comparison; a slow rank is slow in each part, so that short disturbances do not count
_STEPS_OF_PART = 10
_START_UP_RUNS = 3  # in which TensorFlow prepares the graph for new sets of fetches
# Times the median of the others; two limits, so that a rank near a limit is named only once.
_SLOW, _SLOW_STILL = 1.2, 1.1
# Smaller differences are not worth a change, and rank 0 has more to write than others.
_LEAST_SECS = 0.002


class OwnWorkTimes:
    """Adds up a rank's own work and waiting, until there are enough steps for a comparison of the ranks.

    Own work is the time from the end of the previous step's reductions until this rank's last gradient is ready.
    """

    def __init__(self) -> None:
        self._done = 0.0
        self._runs, self._counts = 0, False
        self._begin()

    def _begin(self) -> None:
        self._own_secs = self._waiting_secs = 0.0  # of the current update
        self._steps_of_part: list[tuple[float, float]] = []  # seconds of own work and of waiting
        self._parts: list[tuple[float, ...]] = []  # the medians of each part

    def add_run(
        self, ready_time: float, done_time: float, is_update: bool = True, steps: int = 1
    ) -> list[float] | None:
        """Adds a session run.

        Args:
          ready_time, done_time: when this rank's gradients were ready, and when the reductions ended, in seconds since
            the epoch.
          is_update: whether gradients were exchanged; otherwise the batch is part of a later update.
          steps: steps of the run; all are assumed to have waited as long as the last one.
        Returns:
          The numbers that ranks compare, once there are enough steps, else None: own work in each part, in seconds
          per step, and the fraction of waiting.
        """
        began, self._done, self._runs = self._done, done_time, self._runs + 1
        if not self._counts:
            self._counts = is_update and self._runs >= _START_UP_RUNS
            return None
        waiting = max(done_time - ready_time, 0.0) * steps
        self._waiting_secs += waiting
        self._own_secs += max(done_time - began - waiting, 0.0)
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

    def exclude_time_until(self, time: float) -> None:
        """Excludes the time until `time`, in which early ranks waited for others in a comparison, from own work."""
        self._done = time


def compare_ranks(
    step: int,
    time: float,
    own_work_secs: Sequence[Sequence[float]],
    waiting_fractions: Sequence[float],
    slow_ranks: Collection[int],
) -> Comparison:
    """Returns a comparison of the ranks, with the slow ranks.

    Args:
      step, time: step and time of the comparison.
      own_work_secs: for each rank, its own work in a typical step of each part of the compared steps.
      waiting_fractions: for each rank, the fraction of a typical step that it waited.
      slow_ranks: the ranks that were slow before.
    """
    slow_now = []
    for rank, own in enumerate(own_work_secs):
        others = [statistics.median(_without_rank(part, rank)) for part in zip(*own_work_secs)]
        if rank in slow_ranks:
            is_slow = sum(own) > _SLOW_STILL * sum(others)
        else:
            is_slow = all(one > max(_SLOW * other, other + _LEAST_SECS) for one, other in zip(own, others))
        slow_now += [rank] if is_slow else []
    means = [statistics.fmean(own) for own in own_work_secs]
    return Comparison(
        step, time, [round(1000 * own, 3) for own in means], [round(each, 4) for each in waiting_fractions], slow_now
    )


def describe_changes(earlier: Comparison | None, latest: Comparison) -> list[str]:
    """Returns a sentence for each rank that has become slow, and for each rank that has recovered."""
    known = earlier.slow if earlier else []
    said = [describe_slow_rank(latest, rank) for rank in latest.slow if rank not in known]
    return said + [
        f"rank {rank} is no longer slow: {_describe_own_work(latest, rank)}"
        for rank in known
        if rank not in latest.slow
    ]


def describe_slow_rank(comparison: Comparison, rank: int) -> str:
    """Returns a sentence about a slow rank and the time that the others wait for it."""
    who = "the others wait" if len(comparison.own_ms) > 2 else "the other waits"
    lost = f"{who} {time_share_lost_to_rank(comparison, rank):.0%} of the time for it"
    return f"rank {rank} is slow: {_describe_own_work(comparison, rank)}; {lost}"


def list_slow_ranks(comparison: Comparison | None) -> str | None:
    """Returns a few words that name the slow ranks, for a progress line; None if there are none."""
    if comparison is None or not comparison.slow:
        return None
    names = ", ".join(map(str, comparison.slow))
    lost = max(time_share_lost_to_rank(comparison, rank) for rank in comparison.slow)
    return f"rank{'s' if len(comparison.slow) > 1 else ''} {names} slow, others wait {lost:.0%}"


def time_share_lost_to_rank(comparison: Comparison, rank: int) -> float:
    """Returns the fraction of time that the others wait for a rank: their median waiting minus the rank's waiting."""
    return max(statistics.median(_without_rank(comparison.waiting, rank)) - comparison.waiting[rank], 0.0)


def slowest_rank_metrics(comparison: Comparison | None) -> dict[str, float]:
    """Returns metrics of the rank with the most own work, slow or not; an empty dict before the first comparison."""
    if comparison is None:
        return {}
    rank = max(range(len(comparison.own_ms)), key=comparison.own_ms.__getitem__)
    others = statistics.median(_without_rank(comparison.own_ms, rank))
    return {
        "slowest_rank": rank,
        "slowest_rank_own_ms": comparison.own_ms[rank],
        "other_ranks_own_ms": others,
        "waiting_for_slowest_rank": time_share_lost_to_rank(comparison, rank),
    }


def list_slow_periods(history: History) -> list[tuple[Comparison, int, int | None]]:
    """Returns the periods in which a rank was slow.

    Returns:
      List of (comparison that first found the rank slow, rank, step at which it was fast again or None).
    """
    done: list[tuple[Comparison, int, int | None]] = []
    named: dict[int, Comparison] = {}
    for comparison in history.comparisons:
        done += [(named.pop(rank), rank, comparison.step) for rank in list(named) if rank not in comparison.slow]
        named.update((rank, comparison) for rank in comparison.slow if rank not in named)
    done += [(comparison, rank, None) for rank, comparison in named.items()]
    return sorted(done, key=lambda spell: (spell[0].step, spell[1]))


def _describe_own_work(comparison, rank):
    others = statistics.median(_without_rank(comparison.own_ms, rank))
    own, theirs = (format_secs(each / 1000) for each in (comparison.own_ms[rank], others))
    whose = f"that of the others {theirs} (median)" if len(comparison.own_ms) > 2 else f"that of the other {theirs}"
    return f"its own work takes {own} a step, {whose}"


def _without_rank(values, rank):
    return [value for other, value in enumerate(values) if other != rank]
