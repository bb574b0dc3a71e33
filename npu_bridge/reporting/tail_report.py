"""Merges the timelines of all ranks into one picture, one JSON file and one line of text."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from npu_bridge.base.files import write_whole
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
    described = {"rank": shown.rank, **tail._asdict(), "shown_step": shown.step}
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
