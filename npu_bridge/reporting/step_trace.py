"""Computes how long a recorded step computes, communicates, and waits for communication (the exposed tail).

The tail is the time after the backward pass. The tail is exposed while gradients or decisions are being transferred and
this rank computes nothing, neither updates nor anything else. Transfers at the same time as computation cost nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

Interval = tuple[float, float]


def merge_intervals(intervals: Iterable[Interval], gap: float = 0.0) -> list[Interval]:
    """Sorts intervals and joins those that overlap.

    Args:
      intervals: pairs of begin and end; empty intervals are left out.
      gap: pauses of up to this length are filled.
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


def subtract_intervals(intervals: Iterable[Interval], others: Iterable[Interval]) -> list[Interval]:
    """Returns the parts of `intervals` outside of `others`, in order and without overlaps."""
    taken = merge_intervals(others)
    rest: list[Interval] = []
    for begin, end in merge_intervals(intervals):
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


def total_length(intervals: Iterable[Interval]) -> float:
    """Returns the total length of intervals; overlaps count once."""
    return sum(end - begin for begin, end in merge_intervals(intervals))


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One transfer between ranks. Times are in ms from the beginning of the step.

    Attributes:
      name: name of the operator, the same on every rank.
      begin_ms: time at which this rank passed its data to the transfer.
      wire_ms: earliest time at which the transfer was on the wire. Before that, it waited for other ranks or for the
        previous transfer.
      end_ms: time at which the result was ready.
      fragment: number of the aggregation fragment; None for other transfers.
      is_decision: whether it is the joint decision about the step, which is one number.
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
    """One step on one rank. Times are in ms from the beginning of the step; intervals do not overlap.

    Attributes:
      step: number of the step.
      rank: the rank.
      start_secs: beginning of the step on the clock of the rank's host, in seconds since the epoch.
      duration_ms: time at which the last operator ended.
      backward_end_ms: time at which the last gradient of this rank was ready.
      compute: intervals in which the forward and backward pass computed.
      updates: intervals in which variables were updated, or other operators ran that had waited for a transfer.
      transfers: the transfers, in the order in which they ended.
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
    def exposed_intervals(self) -> list[Interval]:
        """Intervals after the backward pass in which this rank only waited for transfers."""
        tail = [
            (max(transfer.begin_ms, self.backward_end_ms), min(transfer.end_ms, self.duration_ms))
            for transfer in self.transfers
        ]
        return subtract_intervals(tail, [*self.compute, *self.updates])

    @property
    def exposed_ms(self) -> float:
        """Length of the exposed tail: the time after the backward pass in which this rank only waits for transfers."""
        return total_length(self.exposed_intervals)

    def as_facts(self) -> dict[str, Any]:
        """Returns the trace as plain data for JSON, with the exposed tail."""
        return {**dataclasses.asdict(self), "exposed": self.exposed_intervals, "exposed_ms": self.exposed_ms}

    @classmethod
    def from_facts(cls, facts: dict[str, Any]) -> StepTrace:
        """Makes a trace from the result of `as_facts`."""
        fields = {field.name: facts[field.name] for field in dataclasses.fields(cls)}
        for name in ("compute", "updates"):
            fields[name] = tuple((begin, end) for begin, end in facts[name])
        fields["transfers"] = tuple(Transfer(**transfer) for transfer in facts["transfers"])
        return cls(**fields)


def shift_to_one_clock(traces: Sequence[StepTrace]) -> list[StepTrace]:
    """Returns traces of one rank with all times counted from the beginning of the first trace.

    `duration_ms` becomes the time at which the step ended. All transfers go one after the other, across steps, too: no
    transfer is on the wire before the previous one has ended.
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


def set_wire_times(traces: Sequence[StepTrace], clock_leads_secs: Sequence[float] | None = None) -> list[StepTrace]:
    """Determines when each transfer was put on the wire, from the traces of one step on all ranks.

    A transfer cannot begin before the last rank has passed its data, nor before the end of the previous transfer.

    Args:
      traces: traces of one step, one for each rank.
      clock_leads_secs: for each rank, how far its clock is ahead; None if all clocks agree.
    Returns:
      The traces in the same order, with new `wire_ms`.
    """
    starts = [trace.start_secs - lead for trace, lead in zip(traces, clock_leads_secs or [0.0] * len(traces))]
    handed_over: dict[str, float] = {}
    for trace, start in zip(traces, starts):
        for transfer in trace.transfers:
            begin_secs = start + transfer.begin_ms / 1000
            handed_over[transfer.name] = max(begin_secs, handed_over.get(transfer.name, begin_secs))
    return [_with_wire_times(trace, start, handed_over) for trace, start in zip(traces, starts)]


def _with_wire_times(trace, start_secs, last_ready_secs):
    transfers: list[Transfer] = []
    for transfer in sorted(trace.transfers, key=lambda transfer: transfer.end_ms):
        all_here_ms = max(transfer.begin_ms, (last_ready_secs[transfer.name] - start_secs) * 1000)
        before = transfers[-1] if transfers else None
        if before is not None and _are_sent_together(before, transfer, all_here_ms):
            wire_ms = before.wire_ms
        else:
            wire_ms = all_here_ms if before is None else max(all_here_ms, before.end_ms)
        transfers.append(dataclasses.replace(transfer, wire_ms=min(wire_ms, transfer.end_ms)))
    return dataclasses.replace(trace, transfers=tuple(transfers))


def _are_sent_together(previous_transfer, transfer, all_here_ms):
    """Returns whether Horovod joined two transfers; their results then arrive shortly after each other.

    Fragments and decisions are never joined. This function, not Horovod, sets the limit for the delay.
    """
    is_joinable = all(each.fragment is None and not each.is_decision for each in (previous_transfer, transfer))
    unpacking_ms = max(0.5, 0.25 * (previous_transfer.end_ms - previous_transfer.wire_ms))
    return (
        is_joinable
        and all_here_ms <= previous_transfer.wire_ms
        and transfer.end_ms - previous_transfer.end_ms <= unpacking_ms
    )
