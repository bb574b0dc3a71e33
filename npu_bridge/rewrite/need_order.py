"""The order in which a step sends gradients when the next step is about to begin.

Gradients become ready from the last layer to the first, and the next forward pass needs the variables from the first
layer to the last. While the backward pass goes on, gradients travel as they become ready. What is left when it is over
has no order of its own: of it, what is needed first goes first.
"""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from npu_bridge.rewrite.branches import SUMS
from npu_bridge.rewrite.loop_nodes import LoopNodes, copy_name
from npu_bridge.rewrite.step_order import StepOrder
from npu_bridge.rewrite.transfers import is_flag_transfer

# What a gradient passes between the place where it is held back and its transfer.
_ON_THE_WAY = frozenset({"Bitcast", "Cast", "ConcatV2", "DeepCopy", "Identity", "Pad", "Reshape"})


class FreeOrder(NamedTuple):
    """Transfers that wait for one another only so that few are under way at once.

    Attributes:
      transfers: them, as their gradients become ready.
      gradients: of each, the operators that give what it sends.
      earlier: of each, the operators that tell it that another one has arrived.
      not_for: by name of an operator that holds gradients back, the names of what it need not wait for.
    """

    transfers: list[tf.Operation]
    gradients: list[list[tf.Operation]]
    earlier: list[list[tf.Operation]]
    not_for: dict[str, set[str]]


NO_ORDER = FreeOrder([], [], [], {})


def find_free_order(order: StepOrder) -> FreeOrder:
    """The transfers of a step that may go in any order; none where they do not wait for one another, or for more."""
    sums = [op for op in order.ordered if op.type in SUMS and not is_flag_transfer(op)]
    transfers = sorted(sums, key=lambda op: op._id)
    if any(order.conditions[op.name] for op in transfers):
        return NO_ORDER
    behind = _waiting_for_some(transfers, order, {})
    ways = [_way_of(transfer) for transfer in transfers]
    not_for = {
        gate.name: {other.name for other in gate.control_inputs if other.name in behind}
        for gates, _ in ways
        for gate in gates
    }
    still_behind = _waiting_for_some(transfers, order, not_for)
    has_other_waits = any(other.name in still_behind for op in transfers for other in order.waited_for(op))
    if has_other_waits or not any(not_for.values()):
        return NO_ORDER
    inside = {op.name for op in order.ordered}
    gradients = [[op for op in found if op.name in inside] for _, found in ways]
    earlier = [[op for gate in gates for op in gate.control_inputs if op.name in behind] for gates, _ in ways]
    return FreeOrder(transfers, gradients, earlier, not_for)


def add_order_of_need(nodes: LoopNodes, order: StepOrder, free: FreeOrder) -> dict[str, str]:
    """Adds nodes that transfers wait for: each goes in its turn while gradients become ready, or when all of them are.

    Then the rest goes at once, what is needed first in front. So no rank waits to send what another one has sent, also
    where ranks see the backward pass end at different times.

    Args:
      nodes: of the loop.
      order: of the step.
      free: from `find_free_order`.
    Returns:
      The node for each transfer, by the transfer's name.
    """
    if not free.transfers:
        return {}
    # Also after what the last one waits for besides its gradients, the decision about the step: that is small, and
    # would queue behind all that is sent before it.
    last = [*sum(free.gradients, []), *order.waited_for(free.transfers[-1])]
    turn = _add_signal(nodes, "sending/all_ready", last)
    turns = {}
    for number, transfer in reversed(list(enumerate(free.transfers))):
        ready = _add_signal(nodes, f"sending/ready_{number}", [*free.earlier[number], *free.gradients[number]])
        # A merge goes on with what comes first.
        turns[transfer.name] = nodes.add(f"sending/either_{number}", "Merge", [ready, turn], T=tf.int64, N=2)
        turn = nodes.add(f"sending/turn_{number}", "Identity", [turn], T=tf.int64)
    return turns


def _add_signal(nodes, name, after):
    controls = dict.fromkeys(f"^{copy_name(op)}" for op in after)
    return nodes.add(name, "Identity", ["iteration", *controls], T=tf.int64)


def _way_of(transfer):
    """The operators that may hold back what a transfer sends, and those that give it."""
    stack, gates, gradients = [tensor.op for tensor in transfer.inputs], [], []
    while stack:
        op = stack.pop()
        if op.type not in _ON_THE_WAY:
            gradients.append(op)
        elif op.control_inputs:
            gates.append(op)
            gradients.extend(tensor.op for tensor in op.inputs)
        else:
            stack.extend(tensor.op for tensor in op.inputs)
    return gates, sorted(gradients, key=lambda op: op._id)


def _waiting_for_some(transfers, order, not_for):
    """Names of the operators that wait for one of these transfers, and of the transfers."""
    found = {op.name for op in transfers}
    for op in order.ordered:
        ignored = not_for.get(op.name, ())
        if any(other.name in found and other.name not in ignored for other in order.waited_for(op)):
            found.add(op.name)
    return found
