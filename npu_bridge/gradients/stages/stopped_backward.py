"""Stops an existing backward pass early in steps that need only a part of its gradients.

In a session and in a `tf.function`, an operator does not run if its control input does not run. So every operator that
only frozen variables need gets a control input from a branch that is taken only in steps that train these variables.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.tf_internals.graphs import add_control_inputs, control_outputs, is_compiled_by_xla
from npu_bridge.gradients.arithmetic import backward_order_key, gradient_from_parts, gradient_parts, zero_gradient_like
from npu_bridge.graph.operators import consumers, needed_ops

# A merge runs even if an input is missing, and operators in a loop cannot wait for operators outside.
_NEVER_SKIPPED = {
    "Merge",
    "Switch",
    "_SwitchN",
    "Enter",
    "Exit",
    "NextIteration",
    "LoopCond",
    "ControlTrigger",
    "Placeholder",
}
_NEVER_SKIPPED |= {f"Ref{kind}" for kind in _NEVER_SKIPPED} | {"PlaceholderWithDefault", "_Arg"}
_FUNCTIONS = ("func", "list(func)")  # attributes that hold functions


def cut_backward_pass(grads_and_vars: Sequence, last_groups: Sequence[int], group: tf.Tensor, losses: Sequence) -> list:
    """Changes the graph so that the gradient of each variable is computed only in steps that train the variable.

    Operators with side effects, loops, conditions and functions that the model calls run in all steps, with all their
    inputs.

    Args:
      grads_and_vars: (gradient, variable) pairs of the current graph or function, not yet used by other code.
      last_groups: for each pair, the number of the last group that trains the variable.
      group: number of the group of the step, an int32 scalar.
      losses: the differentiated losses, which are computed in all steps.
    Returns:
      Pairs with gradients of the same shapes, dense or sparse as before. A gradient that is not computed is zero, or
      sparse without rows.
    """
    graph, top = tf.compat.v1.get_default_graph(), max(last_groups)
    pairs = list(grads_and_vars)
    if tf.executing_eagerly() or is_compiled_by_xla(graph):
        return pairs
    ends: dict = {}
    for (grad, _), last in zip(pairs, last_groups):
        for part in [] if grad is None else gradient_parts(grad):
            ends[part.op] = max(last, ends.get(part.op, 0))
    ends.update((getattr(loss, "op", None), top) for loss in tf.nest.flatten(losses))
    needed_until = _last_group_by_op(graph, ends, top)
    # Includes variables whose gradient comes from an operator that later groups still need.
    branches = {last: _Branch(tf.less_equal(group, last)) for last in sorted({*last_groups} - {top})}
    for op, last in needed_until.items():
        if not any(needed_until.get(tensor.op) == last for tensor in op.inputs):
            add_control_inputs(op, [branches[last].taken])
    # In the order in which the backward pass computes gradients: the all-reduce expects this order.
    for position in sorted(range(len(pairs)), key=backward_order_key([grad for grad, _ in pairs])):
        grad, variable = pairs[position]
        if grad is not None and any(part.op in needed_until for part in gradient_parts(grad)):
            pairs[position] = (branches[last_groups[position]].gradient_or_zeros(grad, variable), variable)
    return pairs


class _Branch:
    """A branch of the graph that is taken in some steps.

    Attributes:
      taken: an operator that runs only in steps that take the branch.
    """

    def __init__(self, is_taken):
        self._is_taken = is_taken
        off, on = tf.raw_ops.Switch(data=is_taken, pred=is_taken)
        self.taken, self._left = tf.identity(on).op, tf.identity(off).op

    def gradient_or_zeros(self, grad: Any, variable: Any) -> Any:
        """Returns a gradient in steps that take the branch, and zeros in other steps."""
        with tf.control_dependencies([self._left]):
            nothing = [tf.identity(part) for part in gradient_parts(zero_gradient_like(grad, variable))]
        merged = []
        for part, without in zip(gradient_parts(grad), nothing):
            computed = tf.raw_ops.Switch(data=part, pred=self._is_taken).output_true
            merged.append(tf.raw_ops.Merge(inputs=[computed, without]).output)
        return gradient_from_parts(grad, variable, iter(merged))


def _last_group_by_op(graph, group_by_end_op, highest_group):
    """Maps operators to the last group that needs the operator; leaves out operators that every group needs."""
    numbers = {op: number for number, op in enumerate(graph.get_operations())}
    operators = list(numbers)
    # Latest first, so that all users of an operator are visited before the operator; an unvisited user is in a loop.
    # Leaves of the backward pass that are not gradients do not count. In the forward pass, all ops lead to the loss.
    waiting = [-numbers[op] for op in group_by_end_op if op in numbers]
    heapq.heapify(waiting)
    found: dict = {}
    last_number = None
    while waiting:
        number = heapq.heappop(waiting)
        if number == last_number:
            continue
        last_number, op = number, operators[-number]
        users = {user for user in _users(op) if user in group_by_end_op or _users(user) or not _can_be_skipped(user)}
        last = max([group_by_end_op.get(op, 0), *(found.get(user, highest_group) for user in users)])
        if last < highest_group and _can_be_skipped(op):
            found[op] = last
            for other in needed_ops(op):
                heapq.heappush(waiting, -numbers[other])
    return found


def _users(op):
    return [*consumers(op), *control_outputs(op)]


def _can_be_skipped(op):
    definition = op.op_def
    if definition is None or definition.is_stateful or op.type in _NEVER_SKIPPED:
        return False
    return not any(attribute.type in _FUNCTIONS for attribute in definition.attr)
