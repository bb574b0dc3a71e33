"""Tells the operators of transfers in graphs, of both engines."""

from __future__ import annotations

from npu_bridge.graph.loop import COLLECTIVE_TYPES


def is_transfer(kind):
    """Whether an operator type sends something to other ranks."""
    return kind.startswith(COLLECTIVE_TYPES)


def sums_fragment(name, kind):
    """Whether an operator adds up a fragment of gradients."""
    return kind == "HorovodGroupedAllreduce" or (kind == "CollectiveReduceV2" and "_fragment_" in name)
