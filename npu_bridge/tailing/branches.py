"""Finds collectives inside functions that operators run, such as the branches of a condition."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.tf_internals.graphs import function_definition
from npu_bridge.graph.functions import nodes_in_functions

TYPES = ("If", "StatelessIf")
CALLS = (*TYPES, "PartitionedCall", "StatefulPartitionedCall", "While", "StatelessWhile", "Case", "StatelessCase")
SUMS = ("HorovodAllreduce", "HorovodGroupedAllreduce")
JOINS = ("HorovodAllgather", "HorovodGroupedAllgather")
CHANGES_OF_DTYPE = ("Identity", "Cast")


class ExchangeBranch(NamedTuple):
    """A branch that only exchanges its inputs with other ranks; the fields are those of a `Transfer`."""

    routes: tuple[tuple[int, int], ...]
    factor: float
    wire_dtype: tf.DType
    adds_up: bool


def find_exchange(op: tf.Operation) -> ExchangeBranch | None:
    """Returns the exchange in a condition: one branch sends its inputs between ranks, the other returns its inputs.

    `hvd.DistributedOptimizer` builds such conditions with control flow of TensorFlow 2. Integers, such as the indices
    of sparse gradients, are ignored. Returns None if the branches have other operators, or if neither communicates.

    Args:
      op: an operator of one of the types in `TYPES`.
    """
    body, other = _branch_function(op, "then_branch"), _branch_function(op, "else_branch")
    if not any(map(_is_transfer, body.node_def)):
        return None
    routes, transfers = [], []
    for position, tensor in enumerate(op.outputs):
        if tensor.dtype.is_floating:
            argument, passed = _trace_to_argument(body, position)
            if len(passed) != 1 or _trace_to_argument(other, position) != (argument, []):
                return None
            # The first input is the condition.
            routes.append((position, 1 + argument))
            transfers += passed
    dtypes = {tf.as_dtype(node.attr["T"].type) for node in transfers}
    if len(dtypes) != 1:
        return None
    sums = [node for node in transfers if node.op in SUMS]
    factors = [abs(node.attr["prescale_factor"].f * node.attr["postscale_factor"].f) for node in sums]
    return ExchangeBranch(tuple(routes), max([1.0, *factors]), dtypes.pop(), adds_up=bool(sums))


def transfers_inside(op: tf.Operation) -> list[str]:
    """Returns the names of floating-point collectives in the functions that an op runs."""
    inside = nodes_in_functions(op.graph, [op.node_def]) if op.type in CALLS else ()
    return [f"{op.name}/{node.name}" for node in inside if _is_transfer(node)]


def _is_transfer(node):
    return node.op in (*SUMS, *JOINS) and tf.as_dtype(node.attr["T"].type).is_floating


def _branch_function(op, branch):
    return function_definition(op.graph, op.get_attr(branch).name)


def _trace_to_argument(body, position):
    """Follows an output of a function back to an argument of the function.

    Follows only collectives, casts, and divisions by at least 1.

    Returns:
      The position of the argument, or None if there are other operators; and the collectives on the way.
    """
    nodes = {node.name: node for node in body.node_def}
    arguments = [argument.name for argument in body.signature.input_arg]
    reference, passed = body.ret[body.signature.output_arg[position].name], []
    while (node := nodes.get(reference.partition(":")[0])) is not None:
        source = 0
        if _is_transfer(node):
            source = int(reference.rpartition(":")[2])
            passed.append(node)
        elif not (node.op in CHANGES_OF_DTYPE or (node.op == "RealDiv" and _is_at_least_one(node.input[1], nodes))):
            return None, passed
        reference = node.input[source]
    return (arguments.index(reference) if reference in arguments else None), passed


def _is_at_least_one(reference, nodes: Mapping[str, Any]):
    node = nodes.get(reference.partition(":")[0])
    while node is not None and node.op in CHANGES_OF_DTYPE:
        node = nodes.get(node.input[0].partition(":")[0])
    if node is None or node.op != "Const":
        return False
    value = tf.make_ndarray(node.attr["value"].tensor)
    return value.ndim == 0 and abs(value) >= 1
