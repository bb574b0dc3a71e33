"""Merges the timelines of all ranks into one picture, one JSON file and one line of text."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from npu_bridge.base.files import write_atomically
from npu_bridge.reporting.step_trace import StepTrace, set_wire_times
from npu_bridge.reporting.tail_picture import draw_overlapping_steps, draw_step


class TailFacts(NamedTuple):
    """The recorded steps of the first rank, and the step in the picture.

    Attributes:
      steps: numbers of the recorded steps, ascending.
      exposed_ms: time after the backward pass in which the step in the picture, the median step, waits for transfers.
      step_ms: duration of the step in the picture.
      overlaps: whether overlapping steps were recorded, too.
    """

    steps: list[int]
    exposed_ms: float
    step_ms: float
    overlaps: bool = False


def draw_tail(
    facts_of_ranks: Sequence[Mapping[str, Any]], picture_path: str, facts_path: str, overlap_path: str
) -> TailFacts:
    """Draws the median step of the first rank, and writes the traces of all ranks and steps.

    Args:
      facts_of_ranks: for each rank, a dictionary with "rank", "host", "steps" (facts of `StepTrace`, at least one) and
        "overlapping_steps".
      picture_path: SVG file to write.
      facts_path: JSON file to write.
      overlap_path: SVG file for the overlapping steps of the first rank, if there are any.
    Raises:
      OSError: a file cannot be written.
    """
    traces = merge_traces(facts_of_ranks)
    shown = typical_step(traces)
    own = [trace for trace in traces if trace.rank == shown.rank]
    overlapping = merge_traces(facts_of_ranks, "overlapping_steps")
    tail = TailFacts(
        sorted(trace.step for trace in own), round(shown.exposed_ms, 4), round(shown.duration_ms, 4), bool(overlapping)
    )
    write_atomically(picture_path, draw_step(shown, ranks=len(facts_of_ranks)))
    if overlapping:
        first = min(trace.rank for trace in overlapping)
        write_atomically(
            overlap_path,
            draw_overlapping_steps([trace for trace in overlapping if trace.rank == first], len(facts_of_ranks)),
        )
    described = {"rank": shown.rank, **tail._asdict(), "shown_step": shown.step}
    described["traces"] = [trace.as_facts() for trace in traces]
    described["overlapping_traces"] = [trace.as_facts() for trace in overlapping]
    write_atomically(facts_path, json.dumps(described))
    return tail


def typical_step(traces: Sequence[StepTrace]) -> StepTrace:
    """Returns, of the steps of the lowest rank, the step with the median exposed communication time."""
    first = min(trace.rank for trace in traces)
    own = sorted((trace for trace in traces if trace.rank == first), key=lambda trace: trace.exposed_ms)
    return own[(len(own) - 1) // 2]


def merge_traces(facts_of_ranks: Sequence[Mapping[str, Any]], kind: str = "steps") -> list[StepTrace]:
    """Returns the traces of all ranks, by step and rank; their transfers show when they waited for other ranks.

    Args:
      facts_of_ranks: as in `draw_tail`.
      kind: the key of the traces: "steps" or "overlapping_steps".
    """
    hosts = {facts["rank"]: facts["host"] for facts in facts_of_ranks}
    by_step: dict[int, list[StepTrace]] = {}
    for facts in sorted(facts_of_ranks, key=lambda facts: facts["rank"]):
        for step in facts.get(kind, ()):
            trace = StepTrace.from_facts(step)
            by_step.setdefault(trace.step, []).append(trace)
    merged: list[StepTrace] = []
    for _, traces in sorted(by_step.items()):
        host = hosts[traces[0].rank]  # the ranks of a host share a clock
        leads = [0.0 if hosts[trace.rank] == host else _lead_secs(traces[0], trace) for trace in traces]
        merged.extend(set_wire_times(traces, leads))
    return merged


def _lead_secs(first, other):
    """Estimates how far a rank's clock is ahead of the first rank's; transfers end on both at almost the same time."""
    ends = {transfer.name: first.start_secs + transfer.end_ms / 1000 for transfer in first.transfers}
    leads = [
        other.start_secs + transfer.end_ms / 1000 - ends[transfer.name]
        for transfer in other.transfers
        if transfer.name in ends
    ]
    return statistics.median(leads) if leads else 0.0
