"""Measures from recorded steps how fast a job computes its gradients and how fast it all-reduces them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from npu_bridge.collective.cost_model import FORWARD_SHARE
from npu_bridge.collective.measured_split import Speeds
from npu_bridge.reporting.step_trace import StepTrace


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
