"""The pass that puts training steps into a loop of the graph: one op trains as many steps as it is told.

Everything a step computes is copied into the body of a TF 1 loop. Its iterations run strictly one after the other, so
the copy computes what running the original step again would.

Not every step can be copied. Some operators keep state in themselves, others belong to the ranks. For such steps the
pass changes nothing and says why. The seeded random number generator of a dropout keeps state, too; its copy can share
it (`loop_draws.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import tensorflow as tf

from npu_bridge.rewrite.loop_draws import (
    RANDOM,
    add_function,
    add_place_of_call,
    draw_in_call,
    draws_unseeded_numbers,
    name_of_call,
    place_of_call,
)
from npu_bridge.rewrite.loop_nodes import LOOP_OPS, InGraphLoop, LoopNodes, NotLoopableError, copy_name, ops_inside
from npu_bridge.rewrite.loop_savings import LoopSavings

# Marked as stateful, but what they keep is in a variable, an iterator or a table.
_STATE_ELSEWHERE = (
    "Assert",
    "Assign",
    "DeepCopy",
    "IteratorGetNext",
    "LookupTable",
    "Print",
    "ReadVariableOp",
    "Resource",
    "VarIsInitializedOp",
)
# They negotiate by name: a copy would be another participant.
_AMONG_RANKS = ("Collective", "Horovod", "Nccl")


def put_in_loop(graph: tf.Graph, step: Iterable[tf.Operation], fed: Collection[str] = ()) -> InGraphLoop:
    """Makes a loop whose every iteration does what running some operators does.

    Args:
      graph: a TF 1 graph that is not finalized.
      step: the operators that make up a training step.
      fed: names of tensors whose value is given with the run; every iteration gets the same one.
    Raises:
      NotLoopableError: the step holds something that a copy would not be equal to. The graph is as it was.
    Graph: name scope `iteration_loop`, with a copy of all that the step computes.
    Ranks: local.
    """
    step, fed = list(step), frozenset(fed)
    inside = ops_inside(step, fed)
    calls = _calls_that_draw(inside)
    reasons = {op: reason for op in inside if op not in calls and (reason := _reason_against_a_copy(op))}
    if reasons:
        raise NotLoopableError(reasons, is_only_random=all(op.type in RANDOM for op in reasons))
    nodes, savings = LoopNodes(inside, fed), LoopSavings(inside, fed)
    for name, same in savings.same_values.items():
        nodes.replace(graph.get_tensor_by_name(name), nodes.source(same))
    for op in inside:
        if op in calls:
            add_place_of_call(nodes, op, reads=savings.inputs.get(op.name))
        else:
            nodes.copy(op, reads=savings.inputs.get(op.name), kind=savings.types.get(op.name, op.type))
    nodes.count_on(after=map(copy_name, step))
    functions = {op: add_function(nodes, op, call) for op, call in calls.items()}
    end, count = nodes.import_into(graph)
    for op, call in calls.items():
        draw_in_call(graph.get_operation_by_name(_sibling(end, place_of_call(op))), call, functions[op])
    return InGraphLoop(end, count, shared=tuple(op.name for op in calls))


def _calls_that_draw(inside):
    """The names of calls that can share the kernels of seeded random operators, by operator."""
    calls: dict[tf.Operation, str] = {}
    for op in inside:
        if op.type in RANDOM and not draws_unseeded_numbers(op):
            call = name_of_call(op, calls.values())
            if call:
                calls[op] = call
    return calls


def _sibling(op, name):
    return f"{op.name.rpartition('/')[0]}/{name}"


def _reason_against_a_copy(op):
    if op.type in LOOP_OPS:
        return f"{op.name} is part of a loop of its own"
    if op.type.startswith(_AMONG_RANKS):
        return f"{op.name} ({op.type}) belongs to all ranks"
    if op.op_def.is_stateful and not op.type.startswith(_STATE_ELSEWHERE) and not draws_unseeded_numbers(op):
        return f"{op.name} ({op.type}) keeps state in itself"
    return ""
