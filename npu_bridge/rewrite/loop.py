"""The pass that puts training steps into a loop of the graph: one op trains as many steps as it is told.

Everything a step computes is copied into the body of a TF 1 loop. Its iterations run strictly one after the other, so
the copy computes what running the original step again would.

Not every step can be copied. Some operators keep state in themselves, such as the seeded random number generator of a
dropout: a copy would have its own and repeat numbers. Others belong to the ranks. For such steps the pass changes
nothing and says why.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import tensorflow as tf

from npu_bridge.rewrite.loop_nodes import LOOP_OPS, InGraphLoop, LoopNodes, NotLoopableError, copy_name, ops_inside

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
# Their state is a generator of random numbers in the operator itself.
_RANDOM = frozenset(
    {
        "Multinomial",
        "ParameterizedTruncatedNormal",
        "RandomGamma",
        "RandomPoissonV2",
        "RandomShuffle",
        "RandomStandardNormal",
        "RandomUniform",
        "RandomUniformInt",
        "TruncatedNormal",
    }
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
    reasons = {op: reason for op in inside if (reason := _reason_against_a_copy(op))}
    if reasons:
        raise NotLoopableError(reasons, is_only_random=all(op.type in _RANDOM for op in reasons))
    nodes = LoopNodes(inside, fed)
    for op in inside:
        nodes.copy(op)
    nodes.count_on(after=map(copy_name, step))
    return InGraphLoop(*nodes.import_into(graph, "exit"))


def draws_unseeded_numbers(op: tf.Operation) -> bool:
    """Whether an operator draws random numbers that are others in every session, as nobody gave a seed."""
    return op.type in _RANDOM and op.get_attr("seed") == 0 and op.get_attr("seed2") == 0


def _reason_against_a_copy(op):
    if op.type in LOOP_OPS:
        return f"{op.name} is part of a loop of its own"
    if op.type.startswith(_AMONG_RANKS):
        return f"{op.name} ({op.type}) belongs to all ranks"
    if op.op_def.is_stateful and not op.type.startswith(_STATE_ELSEWHERE) and not draws_unseeded_numbers(op):
        return f"{op.name} ({op.type}) keeps state in itself"
    return ""
