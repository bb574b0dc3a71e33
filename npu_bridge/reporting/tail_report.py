"""Merges the timelines of all ranks into one picture, one JSON file, one line of text and the speeds of the job."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from npu_bridge.base.files import write_whole
from npu_bridge.collective.cost_model import FORWARD_SHARE
from npu_bridge.collective.measured_split import Speeds
from npu_bridge.reporting.step_trace import StepTrace, split_waits
from npu_bridge.reporting.tail_picture import draw_step


class Tail(NamedTuple):
    """The recorded steps of the first rank, and the one of them that the picture shows.

    Attributes:
      steps: their numbers, ascending.
      exposed_ms: exposed tail of the step shown, which is the median one.
      step_ms: how long that step took.
    """

    steps: list[int]
    exposed_ms: float
    step_ms: float


def draw_tail(found: Sequence[Mapping[str, Any]], picture: str, facts: str) -> Tail:
    """Draws the median step of the first rank, and writes the traces of all ranks and steps.

    Args:
      found: for each rank "rank", "host" and "steps" (facts of `StepTrace`), at least one step.
      picture: SVG file to write.
      facts: JSON file to write.
    Raises:
      OSError: a file cannot be written.
    """
    traces = merge(found)
    shown = typical_step(traces)
    own = [trace for trace in traces if trace.rank == shown.rank]
    tail = Tail(sorted(trace.step for trace in own), round(shown.exposed_ms, 4), round(shown.duration_ms, 4))
    write_whole(picture, draw_step(shown, ranks=len(found)))
    speeds = measured_speeds(traces)
    described = {"rank": shown.rank, **tail._asdict(), "shown_step": shown.step}
    if speeds is not None:
        described["speeds"] = dataclasses.asdict(speeds)
    write_whole(facts, json.dumps({**described, "traces": [trace.as_facts() for trace in traces]}))
    return tail


def typical_step(traces: Sequence[StepTrace]) -> StepTrace:
    """Of the lowest rank, the step whose exposed tail is the median."""
    first = min(trace.rank for trace in traces)
    own = sorted((trace for trace in traces if trace.rank == first), key=lambda trace: trace.exposed_ms)
    return own[(len(own) - 1) // 2]


def merge(found: Sequence[Mapping[str, Any]]) -> list[StepTrace]:
    """The traces of all ranks, by step and rank, with the waiting for other ranks told from the wire."""
    hosts = {facts["rank"]: facts["host"] for facts in found}
    by_step: dict[int, list[StepTrace]] = {}
    for facts in sorted(found, key=lambda facts: facts["rank"]):
        for step in facts["steps"]:
            trace = StepTrace.of_facts(step)
            by_step.setdefault(trace.step, []).append(trace)
    merged: list[StepTrace] = []
    for _, traces in sorted(by_step.items()):
        host = hosts[traces[0].rank]  # whose ranks have one clock
        leads = [0.0 if hosts[trace.rank] == host else _lead_secs(traces[0], trace) for trace in traces]
        merged.extend(split_waits(traces, leads))
    return merged


def _lead_secs(first, other):
    """How far the clock of a rank is ahead of the first one's; a transfer ends on both at nearly the same moment."""
    ends = {transfer.name: first.start_secs + transfer.end_ms / 1000 for transfer in first.transfers}
    leads = [
        other.start_secs + transfer.end_ms / 1000 - ends[transfer.name]
        for transfer in other.transfers
        if transfer.name in ends
    ]
    return statistics.median(leads) if leads else 0.0


def measured_speeds(traces: Sequence[StepTrace]) -> Speeds | None:
    """The speeds of the lowest rank, medians over its steps; None when no gradient was all-reduced.

    The forward pass ends where a line from the last gradient back through the first transfer's comes to no bytes. One
    transfer with all of them does not tell; then it is taken to be the usual share of the computation.
    """
    first = min(trace.rank for trace in traces)
    steps = [(trace, _data(trace)) for trace in traces if trace.rank == first and _data(trace)]
    if not steps:
        return None
    transfer_secs, exchange_secs = _line(_secs_by_share([data for _, data in steps]))
    forward_secs = statistics.median(_forward_secs(trace, data) for trace, data in steps)
    until_last = statistics.median(trace.backward_end_ms for trace, _ in steps) / 1000
    return Speeds(forward_secs, max(0.0, until_last - forward_secs), transfer_secs, exchange_secs)


def _data(trace):
    return [transfer for transfer in trace.transfers if transfer.size_bytes and not transfer.is_decision]


def _forward_secs(trace, data):
    earliest = min(data, key=lambda transfer: transfer.begin_ms)
    share = earliest.size_bytes / sum(transfer.size_bytes for transfer in data)
    begin_ms = earliest.begin_ms
    if share == 1.0:
        begin_ms = trace.backward_end_ms * FORWARD_SHARE
    else:
        begin_ms -= max(0.0, trace.backward_end_ms - begin_ms) * share / (1.0 - share)
    return max(0.0, begin_ms) / 1000


def _secs_by_share(steps):
    """For each transfer its share of all bytes and its median time on the wire."""
    times: dict[str, list[float]] = {}
    shares = {}
    for data in steps:
        total = sum(transfer.size_bytes for transfer in data)
        for transfer in data:
            times.setdefault(transfer.name, []).append((transfer.end_ms - transfer.wire_ms) / 1000)
            shares[transfer.name] = transfer.size_bytes / total
    return [(shares[name], statistics.median(secs)) for name, secs in times.items()]


def _line(points):
    """The seconds of no bytes and those of all bytes: the line nearest to the points, none of the two negative."""
    mean_share = statistics.fmean(share for share, _ in points)
    mean_secs = statistics.fmean(secs for _, secs in points)
    spread = sum((share - mean_share) ** 2 for share, _ in points)
    slope = sum((share - mean_share) * (secs - mean_secs) for share, secs in points) / spread if spread else 0.0
    if not 0.0 < slope * mean_share <= mean_secs:
        slope = mean_secs / mean_share  # shares that are all alike, or noise, tell nothing about the fixed part
    return max(0.0, mean_secs - slope * mean_share), slope  # rounding could leave less than nothing
