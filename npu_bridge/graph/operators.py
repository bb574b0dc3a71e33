"""Finds the operators that an operator of a `tf.Graph` needs or feeds, and the operators that a run computes."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from npu_bridge.base.errors import did_you_mean, message, say_once
from npu_bridge.base.search import dependency_order, search

# Operators that lead back to the entrance of a TF 1 loop.
BACK_EDGES = ("NextIteration", "RefNextIteration")
NOTHING_FED: frozenset[str] = frozenset()
# Operators that read a resource variable, which is their first input.
_READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")


def warn_of_unknown_operators(owner: str, names: Iterable[str], graph: tf.Graph, expected: str, fix: str) -> None:
    """Warns, once for each name, of operators that a graph does not have; `owner` is the option with the names."""
    known = [op.name for op in graph.get_operations()]
    for name in sorted({*names}.difference(known)):
        problem, fix_of_name = f"the graph has no operator {name!r}", did_you_mean(name, known, fix)
        say_once(logging.WARNING, message(owner, problem, expected, repr(name), fix_of_name))


def list_elements(graph: tf.Graph, structure: Any) -> list:
    """Returns the tensors and operators in any argument of `session.run`; ignores invalid elements."""
    if isinstance(structure, Mapping):
        parts: Iterable = structure.values()
    elif isinstance(structure, (list, tuple)):
        parts = structure
    else:
        leaves = tf.nest.flatten(structure, expand_composites=True)
        return [element for leaf in leaves for element in _find_graph_element(graph, leaf)]
    return [element for part in parts for element in list_elements(graph, part)]


def producers(elements: Iterable, fed_names: Collection[str] = NOTHING_FED) -> list[tf.Operation]:
    """Returns the operators in `elements`, and those that compute the tensors in `elements`, except fed tensors."""
    return [
        element if isinstance(element, tf.Operation) else element.op
        for element in elements
        if isinstance(element, tf.Operation) or element.name not in fed_names
    ]


def needed_ops(op: tf.Operation, fed_names: Collection[str] = NOTHING_FED) -> list[tf.Operation]:
    """Returns the operators that an operator waits for: the producers of its inputs, then its control inputs."""
    return [*producers(op.inputs, fed_names), *op.control_inputs]


def consumers(op: tf.Operation) -> list[tf.Operation]:
    """Returns the operators that currently read an output of `op`, one entry per read."""
    return [user for tensor in op.outputs for user in tensor.consumers()]


def computed_ops(elements: Iterable, fed_names: Collection[str] = NOTHING_FED) -> list[tf.Operation]:
    """Returns the operators that must run for the given tensors and operators, each after its inputs.

    The body of a TF 1 loop leads back to the loop's entrance, so it comes after everything else. Tensors named in
    `fed_names` need no operators.
    """
    order: dict[tf.Operation, None] = {}
    back: list[tf.Operation] = []

    def needed_first(op):
        needed = needed_ops(op, fed_names)
        back.extend(other for other in needed if other.type in BACK_EDGES)
        return [other for other in needed if other.type not in BACK_EDGES and other not in order]

    starts = producers(elements, fed_names)
    while starts:
        order.update(dict.fromkeys(dependency_order(starts, needed_first)))
        starts = [op for op in dict.fromkeys(back) if op not in order]
        back.clear()
    return list(order)


def sources_among(candidates: Sequence[Any], results: Sequence[Any]) -> list:
    """Returns the candidates on which a result depends, in their given order; ignores control inputs.

    A gradient read back from an accumulator variable does not depend on this step's gradients; a clipped gradient does.
    Candidates used only by other candidates are left out. Eager execution records no dependencies, so all candidates
    are returned. Candidates and results are dense or sparse tensors. Results of a function, such as a branch, can
    depend on candidates of the graphs and functions around it.
    """
    if not results or not candidates or tf.executing_eagerly():
        return list(candidates) if results else []
    reached = _data_sources(results, frozenset(_producing_ops(candidates)))
    return [candidate for candidate in candidates if reached.intersection(_producing_ops([candidate]))]


def variable_ops_behind(results: Sequence[Any]) -> set[tf.Operation]:
    """Returns the operators that stand for the variables which are read to compute dense or sparse tensors."""
    captured, found = _captured_ops(), set()
    for op in _data_sources(results):
        if op.type in _READS:
            holder = op.inputs[0].op
            while captured.get(holder):
                (holder,) = captured[holder]
            found.add(holder)
        elif op.type in ("Variable", "VariableV2"):
            found.add(op)
    return found


def ops_that_hold(variables: Sequence[Any]) -> set[tf.Operation]:
    """Returns the operators that stand for variables in the current graph, or in a function and those around it."""
    handles = [getattr(variable, "handle", variable) for variable in variables]
    inside = {inner.op for outer, inner in _captures() if any(outer is handle for handle in handles)}
    return inside.union(handle.op for handle in handles if _is_in_graph(handle))


def _is_in_graph(handle):
    """Returns whether a handle, or a variable without a handle, belongs to a graph."""
    return tf.is_symbolic_tensor(handle) or not isinstance(handle, tf.Tensor)


def _data_sources(results, ends=frozenset()):
    """Returns the operators from which tensors are computed; does not look beyond `ends`."""
    captured = _captured_ops()

    def sources(op):
        return () if op in ends else [*producers(op.inputs), *captured.get(op, ())]

    return set(search(_producing_ops(results), sources))


def _captured_ops():
    """Returns a dict from the placeholders of a function, and of those around it, to the operators outside."""
    return {inner.op: [outer.op] if tf.is_symbolic_tensor(outer) else [] for outer, inner in _captures()}


def _captures():
    """Yields pairs of a tensor outside of the function being built and its placeholder, then of functions around it."""
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        yield from getattr(graph, "captures", ())
        graph = getattr(graph, "outer_graph", None)


def _producing_ops(values):
    return [
        part.op
        for value in values
        for part in ((value.values, value.indices) if isinstance(value, tf.IndexedSlices) else (value,))
        if tf.is_symbolic_tensor(part)
    ]


def _find_graph_element(graph, leaf):
    try:
        return [graph.as_graph_element(leaf, allow_tensor=True, allow_operation=True)]
    except (KeyError, TypeError, ValueError):
        return []
