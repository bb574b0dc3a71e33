"""Orders the all-reduces of gradients for steps that begin before the previous step's gradients have arrived.

During the backward pass, fragments are sent as they become ready, those of the last layers first. After the backward
pass, the first layers are sent first, because the next forward pass needs them first; the middle layers come last.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import tensorflow as tf

from npu_bridge.collective import fragments
from npu_bridge.collective.apart import run_in_separate_graph
from npu_bridge.graph.loop import COLLECTIVE_TYPES
from npu_bridge.graph.operators import computed_ops, needed_ops

tf1 = tf.compat.v1
# The all-reduces of both engines. Only Horovod can be made to keep an order.
_SUMS = ("HorovodGroupedAllreduce", "CollectiveReduceV2")
_FRAGMENT = re.compile(r"(.*)_fragment_(\d+)_\w+?")
# With fewer, the network is idle while the ranks agree about each new fragment.
_CONCURRENT = 4


def gradient_all_reduces(ops: Iterable[tf.Operation]) -> list[list[tf.Operation]]:
    """Returns the all-reduces of gradients among a step's operators.

    Args:
      ops: the operators of one step, in the order of `computed_ops`.
    Returns:
      A list for each optimizer, in the order of its backward pass.
    """
    found: dict[str, dict[int, tf.Operation]] = {}
    for op in ops:
        fragment = _FRAGMENT.fullmatch(op.name)
        if fragment and op.type in _SUMS:
            found.setdefault(fragment[1], {})[int(fragment[2])] = op
    return [[op for _, op in sorted(transfers.items())] for transfers in found.values()]


def measure_overlap(
    ops: Sequence[tf.Operation], transfers: Sequence[tf.Operation], events: Mapping[str, tuple[float, float]]
) -> tuple[float, float]:
    """Measures the overlap of all-reduces with the backward pass, in a step that all-reduced in this pass's order.

    Args:
      ops: the operators of the step, in the order of `computed_ops`.
      transfers: the all-reduces of one optimizer, in the order of the backward pass.
      events: when operators began and ended, by name.
    Returns:
      The share of the bytes sent before the end of the backward pass, and the time from this end to the last
      all-reduce's end, in the unit of `events`.
    """
    behind = _collectives_and_dependents(ops)
    sent = [tensor for transfer in transfers for tensor in transfer.inputs[0].op.inputs]
    ends = [events[op.name][1] for op in computed_ops(sent) if op not in behind and op.name in events]
    backward_end, free, early = max(ends, default=0.0), 0.0, 0
    seen = [transfer for transfer in transfers if transfer.name in events]
    for transfer in sorted(seen, key=lambda transfer: events[transfer.name][1]):
        if free < backward_end:  # the network became free before the end of the backward pass
            early += _sent_bytes(transfer)
        free = events[transfer.name][1]
    return early / max(sum(map(_sent_bytes, transfers)), 1), max(free - backward_end, 0.0)


def order_for_forward_pass(transfers: Sequence[tf.Operation], early_share: float) -> list[tf.Operation]:
    """Orders all-reduces so that the next forward pass gets the results in the order in which it needs them.

    Args:
      transfers: the all-reduces of one optimizer, in the order of its backward pass.
      early_share: the share of the bytes that is sent in the order of `transfers`; the rest is sent in reverse order.
    """
    limit, sent, first = early_share * sum(map(_sent_bytes, transfers)), 0, 0
    while first < len(transfers) and sent < limit:
        sent += _sent_bytes(transfers[first])
        first += 1
    return [*transfers[:first], *reversed(transfers[first:])]


def dependencies_for_order(
    ops: Sequence[tf.Operation], order: Sequence[tf.Operation]
) -> dict[tf.Operation, list[tf.Operation]]:
    """Returns the control dependencies that make all-reduces begin in a given order, with only a few running at once.

    Args:
      ops: the operators of one step, in the order of `computed_ops`.
      order: the all-reduces of one optimizer, in the wanted order.
    Returns:
      For each operator in front of an all-reduce, the operators that it must wait for in addition to its inputs.
    """
    behind, most = _collectives_and_dependents(ops), fragments.max_concurrent_all_reduces(_CONCURRENT)
    waits = {}
    for number, transfer in enumerate(order):
        entry = transfer.inputs[0].op
        own = [op for op in entry.control_inputs if op not in behind]
        waits[entry] = own + ([order[number - most]] if number >= most else [])
    return waits


def set_horovod_order(order: Sequence[tf.Operation]) -> None:
    """Makes Horovod run all-reduces in this order, from now on, whenever several are ready.

    Horovod numbers collectives when it first runs them, and runs ready collectives in the order of these numbers. So
    this runs each all-reduce once with zeros, one after the other, which takes as long as all-reducing the gradients
    once.

    Args:
      order: all-reduces that have never run.
    Ranks: collective.
    """
    order = [transfer for transfer in order if transfer.type == _SUMS[0]]
    if order and all(tensor.shape.is_fully_defined() for transfer in order for tensor in transfer.inputs):
        run_in_separate_graph(lambda: _run_in_sequence(order))


def _run_in_sequence(order):
    definition, outer = tf1.GraphDef(), {}
    for transfer in order:
        before = [f"^{node.name}" for node in definition.node[-1:]]
        node = definition.node.add()
        node.CopyFrom(transfer.node_def)
        node.attr.pop("_class", None)
        given = {f"outer_{len(outer) + number}:0": tensor for number, tensor in enumerate(transfer.inputs)}
        # A stateful copy, because TensorFlow would evaluate an all-reduce of constants itself.
        outer.update(
            (name, tf.raw_ops.DeepCopy(x=tf.zeros(tensor.shape, tensor.dtype))) for name, tensor in given.items()
        )
        node.input[:] = [*given, *before]
    return tf1.import_graph_def(definition, outer, [transfer.name for transfer in order], name="")


def _sent_bytes(transfer):
    """Returns how many bytes an all-reduce sends; a tensor of unknown static shape counts as 0."""
    return sum((tensor.shape.num_elements() or 0) * tensor.dtype.size for tensor in transfer.inputs)


def _collectives_and_dependents(ops):
    """Returns the all-reduces among operators, and all operators that depend on them."""
    found: set[tf.Operation] = set()
    for op in ops:
        if op.type.startswith(COLLECTIVE_TYPES) or not found.isdisjoint(needed_ops(op)):
            found.add(op)
    return found
