"""Stops a backward pass that is already built, in the steps that need only a part of it.

In a session and in a `tf.function`, an operator whose control input does not run does not run either. So every
operator that only frozen variables need waits for a branch that is taken in the other steps.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.tf_internals.graphs import add_control_inputs, control_outputs, is_compiled_by_xla
from npu_bridge.gradients.arithmetic import backward_order_key, gradient_from_parts, gradient_parts, zero_gradient_like
from npu_bridge.graph.operators import consumers, needed_ops

# A merge runs although an input is missing, and operators in a loop cannot wait for operators outside.
_KEPT = {"Merge", "Switch", "_SwitchN", "Enter", "Exit", "NextIteration", "LoopCond", "ControlTrigger", "Placeholder"}
_KEPT |= {f"Ref{kind}" for kind in _KEPT} | {"PlaceholderWithDefault", "_Arg"}
_FUNCTIONS = ("func", "list(func)")  # attributes that hold functions


def stop_backward(grads_and_vars: Sequence, last_groups: Sequence[int], group: tf.Tensor, losses: Sequence) -> list:
    """Computes the gradients of each variable only in the steps that train it.

    Operators with side effects, loops, conditions and functions that the model calls run in all steps, with all their
    inputs.

    Args:
      grads_and_vars: pairs of the graph or function being built, which no other code has used yet.
      last_groups: for each pair, the number of the last group that trains the variable.
      group: int32 scalar, the group of the step.
      losses: the differentiated losses; they are computed in all steps.
    Returns:
      Pairs of the same kinds and shapes; gradients that are not computed are zeros, or sparse ones without rows.
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
    needed_until = _last_groups_of_operators(graph, ends, top)
    # Includes variables whose gradient comes from an operator that others need for longer.
    branches = {last: _Branch(tf.less_equal(group, last)) for last in sorted({*last_groups} - {top})}
    for op, last in needed_until.items():
        if not any(needed_until.get(tensor.op) == last for tensor in op.inputs):
            add_control_inputs(op, [branches[last].taken])
    # In the order in which the backward pass delivers gradients: code that reduces them looks for that order.
    for position in sorted(range(len(pairs)), key=backward_order_key([grad for grad, _ in pairs])):
        grad, variable = pairs[position]
        if grad is not None and any(part.op in needed_until for part in gradient_parts(grad)):
            pairs[position] = (branches[last_groups[position]].or_nothing(grad, variable), variable)
    return pairs


class _Branch:
    """A branch that is taken in some steps.

    Attributes:
      taken: an operator that runs in these steps.
    """

    def __init__(self, is_taken):
        self._is_taken = is_taken
        off, on = tf.raw_ops.Switch(data=is_taken, pred=is_taken)
        self.taken, self._left = tf.identity(on).op, tf.identity(off).op

    def or_nothing(self, grad: Any, variable: Any) -> Any:
        """Returns a gradient in the steps that take the branch, and zeros in others."""
        with tf.control_dependencies([self._left]):
            nothing = [tf.identity(part) for part in gradient_parts(zero_gradient_like(grad, variable))]
        merged = []
        for part, without in zip(gradient_parts(grad), nothing):
            computed = tf.raw_ops.Switch(data=part, pred=self._is_taken).output_true
            merged.append(tf.raw_ops.Merge(inputs=[computed, without]).output)
        return gradient_from_parts(grad, variable, iter(merged))


def _last_groups_of_operators(graph, ends, top):
    """Returns the operators that some groups do not need, each with the last group that does."""
    numbers = {op: number for number, op in enumerate(graph.get_operations())}
    operators = list(numbers)
    # Latest first, so that all users of an operator are known before it; a user that is not known yet is in a loop.
    # Leaves of the backward pass that are not gradients do not count. In the forward pass everything leads to the loss.
    waiting = [-numbers[op] for op in ends if op in numbers]
    heapq.heapify(waiting)
    found: dict = {}
    last_number = None
    while waiting:
        number = heapq.heappop(waiting)
        if number == last_number:
            continue
        last_number, op = number, operators[-number]
        users = {user for user in _users(op) if user in ends or _users(user) or not _can_be_stopped(user)}
        last = max([ends.get(op, 0), *(found.get(user, top) for user in users)])
        if last < top and _can_be_stopped(op):
            found[op] = last
            for other in needed_ops(op):
                heapq.heappush(waiting, -numbers[other])
    return found


def _users(op):
    return [*consumers(op), *control_outputs(op)]


def _can_be_stopped(op):
    definition = op.op_def
    if definition is None or definition.is_stateful or op.type in _KEPT:
        return False
    return not any(attribute.type in _FUNCTIONS for attribute in definition.attr)
