"""Compares the ranks' own work and waiting, and describes slow ranks: text and numbers only."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence

from npu_bridge.reporting.history import Comparison, History
from npu_bridge.reporting.progress_line import format_secs

PARTS = 5  # parts of a comparison; a slow rank is slow in each, so that a short disturbance does not count
_SLOW, _SLOW_STILL = 1.2, 1.1  # times the median of the others; apart, so that a rank near the limit is named once
# Ours: smaller differences are not worth a change, and rank 0 has more to write than others.
_LEAST_SECS = 0.002


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
    """Returns numbers of the rank with most work, slow or not, for a writer; empty without a comparison."""
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
