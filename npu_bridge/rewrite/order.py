"""The order in which a graph's gradients are all-reduced: few at a time, so that an urgent small one need not queue."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from npu_bridge.collective import fragments, groups
from npu_bridge.graph.index import GraphIndex
from npu_bridge.rewrite.report import Fragment
from npu_bridge.rewrite.transfers import Transfer
from npu_bridge.tf_internals.graphs import update_input


def issue_in_order(transfers: Sequence[Transfer], index: GraphIndex, world_size: int) -> list[Fragment]:
    """Cuts transfers into fragments and lets each fragment wait for one before it, so that few are under way at once.

    The order is that in which the backward pass delivers the gradients; the cut is that of the split strategy, finer
    where a fragment is large.

    Args:
      transfers: the transfers of one graph.
      index: the graph before the pass.
      world_size: number of ranks.
    Returns:
      The fragments, in order.
    Graph: an identity in front of each transfer but those of the first fragments.
    """
    made = {op.name: number for number, op in enumerate(index.ops)}
    ready = sorted(transfers, key=lambda transfer: made[transfer.sent[0].op.name])
    sizes = [transfer.size_bytes for transfer in ready]
    strategy = groups.of_this_process().strategies.of(groups.WORLD)
    cut = strategy.cut(sizes) if strategy.fits(len(sizes)) else [list(range(len(sizes)))]
    flights = fragments.cut_for_flight(cut, sizes, world_size)
    for earlier, later in zip(flights, flights[fragments.most_in_flight() :]):
        with tf.control_dependencies([ready[position].op for position in earlier]):
            for position in later:
                _hold_back(ready[position])
    return [
        Fragment([ready[position].op.name for position in flight], sum(sizes[position] for position in flight))
        for flight in flights
    ]


def _hold_back(transfer):
    for _, position in transfer.routes:
        update_input(transfer.entry, position, tf.identity(transfer.entry.inputs[position]))
