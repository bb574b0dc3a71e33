"""Computes how long a recorded step computes, communicates and waits for communication (the exposed tail).

The tail is the time after the backward pass. It is exposed while gradients or decisions are in transfer and this rank
computes nothing, neither updates nor anything else. Transfers that hide behind computation cost nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

Interval = tuple[float, float]


def union(intervals: Iterable[Interval], gap: float = 0.0) -> list[Interval]:
    """Joins overlapping intervals and sorts them.

    Args:
      intervals: pairs of begin and end; empty ones are left out.
      gap: pauses up to this long are filled.
    """
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if joined and begin <= joined[-1][1] + gap:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def without(intervals: Iterable[Interval], others: Iterable[Interval]) -> list[Interval]:
    """Subtracts `others` from `intervals`; returns intervals in order and without overlaps."""
    taken = union(others)
    rest: list[Interval] = []
    for begin, end in union(intervals):
        for other_begin, other_end in taken:
            if other_end <= begin or other_begin >= end:
                continue
            if other_begin > begin:
                rest.append((begin, other_begin))
            begin = other_end
            if begin >= end:
                break
        if begin < end:
            rest.append((begin, end))
    return rest


def total(intervals: Iterable[Interval]) -> float:
    """Sums the lengths of intervals; overlaps count once."""
    return sum(end - begin for begin, end in union(intervals))


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One transfer between ranks. Times are ms from the beginning of the step.

    Attributes:
      name: name of the operator, the same on every rank.
      begin_ms: when this rank handed it over.
      wire_ms: when it was on the wire at the earliest; before, it waited for other ranks or the transfer before it.
      end_ms: when its result was ready.
      fragment: number of the aggregation fragment; None for other transfers.
      is_decision: whether it is the joint decision about the step, one number.
      size_bytes: bytes received; 0 if not recorded.
    """

    name: str
    begin_ms: float
    wire_ms: float
    end_ms: float
    fragment: int | None = None
    is_decision: bool = False
    size_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class StepTrace:
    """One step on one rank. Times are ms from the beginning of the step, intervals without overlaps.

    Attributes:
      step: its number.
      rank: the rank.
      start_secs: its begin on the clock of the rank's host, seconds since the epoch.
      duration_ms: time until the last operator ended.
      backward_end_ms: when the last gradient of this rank was ready.
      compute: intervals in which forward and backward pass computed.
      updates: intervals in which variables were updated, or other operators ran that had waited for a transfer.
      transfers: the transfers in the order in which they ended.
    """

    step: int
    rank: int
    start_secs: float
    duration_ms: float
    backward_end_ms: float
    compute: tuple[Interval, ...]
    updates: tuple[Interval, ...]
    transfers: tuple[Transfer, ...]

    @property
    def exposed(self) -> list[Interval]:
        """Intervals after the backward pass in which this rank only waited for transfers."""
        tail = [
            (max(transfer.begin_ms, self.backward_end_ms), min(transfer.end_ms, self.duration_ms))
            for transfer in self.transfers
        ]
        return without(tail, [*self.compute, *self.updates])

    @property
    def exposed_ms(self) -> float:
        """Length of the exposed tail."""
        return total(self.exposed)

    def as_facts(self) -> dict[str, Any]:
        """Converts the trace to plain data for JSON, with the exposed tail."""
        return {**dataclasses.asdict(self), "exposed": self.exposed, "exposed_ms": self.exposed_ms}

    @classmethod
    def of_facts(cls, facts: dict[str, Any]) -> StepTrace:
        """Makes a trace of the result of `as_facts`."""
        fields = {field.name: facts[field.name] for field in dataclasses.fields(cls)}
        for name in ("compute", "updates"):
            fields[name] = tuple((begin, end) for begin, end in facts[name])
        fields["transfers"] = tuple(Transfer(**transfer) for transfer in facts["transfers"])
        return cls(**fields)


def on_one_clock(traces: Sequence[StepTrace]) -> list[StepTrace]:
    """Moves steps of one rank to times from the beginning of the first one; `duration_ms` becomes their end.

    Transfers go one after the other, also those of different steps: none is on the wire before the previous one ended.
    """
    start, arrived, moved = min(trace.start_secs for trace in traces), 0.0, []
    for trace in traces:
        offset = (trace.start_secs - start) * 1000
        transfers = []
        for transfer in trace.transfers:
            begin, wire, end = (ms + offset for ms in (transfer.begin_ms, transfer.wire_ms, transfer.end_ms))
            transfers.append(
                dataclasses.replace(transfer, begin_ms=begin, wire_ms=min(max(wire, arrived), end), end_ms=end)
            )
            arrived = max(arrived, end)
        moved.append(
            dataclasses.replace(
                trace,
                start_secs=start,
                duration_ms=trace.duration_ms + offset,
                backward_end_ms=trace.backward_end_ms + offset,
                compute=tuple((begin + offset, end + offset) for begin, end in trace.compute),
                updates=tuple((begin + offset, end + offset) for begin, end in trace.updates),
                transfers=tuple(transfers),
            )
        )
    return moved


def split_waits(traces: Sequence[StepTrace], leads_secs: Sequence[float] | None = None) -> list[StepTrace]:
    """Finds out when each transfer came on the wire, from the traces of all ranks for one step.

    A transfer cannot begin before the last rank has handed it over, nor before the end of the previous one.

    Args:
      traces: one step, one trace for each rank.
      leads_secs: how far the clock of each rank is ahead; None means none is.
    Returns:
      The traces in the same order, with other `wire_ms`.
    """
    starts = [trace.start_secs - lead for trace, lead in zip(traces, leads_secs or [0.0] * len(traces))]
    handed_over: dict[str, float] = {}
    for trace, start in zip(traces, starts):
        for transfer in trace.transfers:
            begin_secs = start + transfer.begin_ms / 1000
            handed_over[transfer.name] = max(begin_secs, handed_over.get(transfer.name, begin_secs))
    return [_with_wire_times(trace, start, handed_over) for trace, start in zip(traces, starts)]


def _with_wire_times(trace, start_secs, handed_over):
    transfers: list[Transfer] = []
    for transfer in sorted(trace.transfers, key=lambda transfer: transfer.end_ms):
        all_here_ms = max(transfer.begin_ms, (handed_over[transfer.name] - start_secs) * 1000)
        before = transfers[-1] if transfers else None
        if before is not None and _are_sent_together(before, transfer, all_here_ms):
            wire_ms = before.wire_ms
        else:
            wire_ms = all_here_ms if before is None else max(all_here_ms, before.end_ms)
        transfers.append(dataclasses.replace(transfer, wire_ms=min(wire_ms, transfer.end_ms)))
    return dataclasses.replace(trace, transfers=tuple(transfers))


def _are_sent_together(before, transfer, all_here_ms):
    """Returns whether Horovod joined two transfers, which then arrive shortly after each other.

    Fragments and decisions are never joined. The limit of the delay is ours.
    """
    is_joinable = all(each.fragment is None and not each.is_decision for each in (before, transfer))
    unpacking_ms = max(0.5, 0.25 * (before.end_ms - before.wire_ms))
    return is_joinable and all_here_ms <= before.wire_ms and transfer.end_ms - before.end_ms <= unpacking_ms
