"""Orders the all-reduces of gradients for steps that begin before the previous step's last gradient has arrived.

While the backward pass runs, fragments are sent as they become ready, last layers first. After it, the first layers go
first, because the next forward pass needs them first. The middle ones come last.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import tensorflow as tf

from npu_bridge.collective import fragments
from npu_bridge.collective.apart import run_apart
from npu_bridge.graph.loop import COLLECTIVE_TYPES
from npu_bridge.graph.operators import computed_ops, needed_ops

tf1 = tf.compat.v1
# The sums of both engines. Only Horovod learns an order.
_SUMS = ("HorovodGroupedAllreduce", "CollectiveReduceV2")
_FRAGMENT = re.compile(r"(.*)_fragment_(\d+)_\w+?")
# Ours: with fewer, the network is idle while the ranks agree about each new fragment.
_IN_FLIGHT = 4


def transfers_of_gradients(ops: Iterable[tf.Operation]) -> list[list[tf.Operation]]:
    """Returns the all-reduces of fragments among operators, a list per optimizer, in the order of its backward pass.

    Args:
      ops: of one step, in the order of `computed_ops`.
    """
    found: dict[str, dict[int, tf.Operation]] = {}
    for op in ops:
        fragment = _FRAGMENT.fullmatch(op.name)
        if fragment and op.type in _SUMS:
            found.setdefault(fragment[1], {})[int(fragment[2])] = op
    return [[op for _, op in sorted(transfers.items())] for transfers in found.values()]


def measure_exchange(
    ops: Sequence[tf.Operation], transfers: Sequence[tf.Operation], events: Mapping[str, tuple[float, float]]
) -> tuple[float, float]:
    """Measures how an exchange overlapped the backward pass, in a step run in the order of the backward pass.

    Args:
      ops: of this step, in the order of `computed_ops`.
      transfers: the all-reduces of one optimizer, in that order.
      events: when operators began and ended, by name.
    Returns:
      The share of the bytes sent before the end of the backward pass, and how much longer the exchange took, in the
      unit of `events`.
    """
    behind = _behind_transfers(ops)
    sent = [tensor for transfer in transfers for tensor in transfer.inputs[0].op.inputs]
    ends = [events[op.name][1] for op in computed_ops(sent) if op not in behind and op.name in events]
    backward_end, free, early = max(ends, default=0.0), 0.0, 0
    seen = [transfer for transfer in transfers if transfer.name in events]
    for transfer in sorted(seen, key=lambda transfer: events[transfer.name][1]):
        if free < backward_end:  # the network became free before that
            early += _sent_bytes(transfer)
        free = events[transfer.name][1]
    return early / max(sum(map(_sent_bytes, transfers)), 1), max(free - backward_end, 0.0)


def order_by_need(transfers: Sequence[tf.Operation], early: float) -> list[tf.Operation]:
    """Returns the order that serves the next forward pass.

    Args:
      transfers: the all-reduces of one optimizer, in the order of its backward pass.
      early: the share of their bytes that is sent in this order; the rest is sent in reverse order.
    """
    limit, sent, first = early * sum(map(_sent_bytes, transfers)), 0, 0
    while first < len(transfers) and sent < limit:
        sent += _sent_bytes(transfers[first])
        first += 1
    return [*transfers[:first], *reversed(transfers[first:])]


def waits_of(ops: Sequence[tf.Operation], order: Sequence[tf.Operation]) -> dict[tf.Operation, list[tf.Operation]]:
    """Returns the control dependencies that make all-reduces begin in an order, with only a few running at once.

    Args:
      ops: of one step, in the order of `computed_ops`.
      order: the all-reduces of one optimizer.
    Returns:
      For each operator in front of an all-reduce, the operators it must wait for besides its inputs.
    """
    behind, most = _behind_transfers(ops), fragments.most_in_flight(_IN_FLIGHT)
    waits = {}
    for number, transfer in enumerate(order):
        entry = transfer.inputs[0].op
        own = [op for op in entry.control_inputs if op not in behind]
        waits[entry] = own + ([order[number - most]] if number >= most else [])
    return waits


def teach_order(order: Sequence[tf.Operation]) -> None:
    """Makes Horovod run all-reduces in this order from now on when several are ready.

    Horovod numbers collectives as it first runs them, and runs ready ones by their numbers. So each of them is run once
    with zeros, one after the other. That takes as long as one exchange.

    Args:
      order: all-reduces that have never run.
    Ranks: collective.
    """
    order = [transfer for transfer in order if transfer.type == _SUMS[0]]
    if order and all(tensor.shape.is_fully_defined() for transfer in order for tensor in transfer.inputs):
        run_apart(lambda: _one_after_the_other(order))


def _one_after_the_other(order):
    definition, outer = tf1.GraphDef(), {}
    for transfer in order:
        before = [f"^{node.name}" for node in definition.node[-1:]]
        node = definition.node.add()
        node.CopyFrom(transfer.node_def)
        node.attr.pop("_class", None)
        given = {f"outer_{len(outer) + number}:0": tensor for number, tensor in enumerate(transfer.inputs)}
        # A stateful copy: TensorFlow would evaluate an all-reduce of constants itself.
        outer.update(
            (name, tf.raw_ops.DeepCopy(x=tf.zeros(tensor.shape, tensor.dtype))) for name, tensor in given.items()
        )
        node.input[:] = [*given, *before]
    return tf1.import_graph_def(definition, outer, [transfer.name for transfer in order], name="")


def _sent_bytes(transfer):
    """Returns its bytes, from static shapes."""
    return sum((tensor.shape.num_elements() or 0) * tensor.dtype.size for tensor in transfer.inputs)


def _behind_transfers(ops):
    """Returns the all-reduces among operators, and all operators that depend on them."""
    found: set[tf.Operation] = set()
    for op in ops:
        if op.type.startswith(COLLECTIVE_TYPES) or not found.isdisjoint(needed_ops(op)):
            found.add(op)
    return found
