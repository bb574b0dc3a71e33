"""What one `session.run` computes, and which of its tensors can be looked at without changing anything.

A tensor is looked at by fetching it along with what the caller fetches. To leave the run as it is, only tensors
it computes anyway are fetched, and of those only the ones whose value is sure to exist: what runs inside a TF 1
loop, or on one side of a condition, cannot be fetched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

# Operators that change a variable, by the beginning of their type.
_WRITING = (
    "Assign",
    "Apply",
    "ResourceApply",
    "ResourceScatter",
    "ResourceSparseApply",
    "Scatter",
    "SparseApply",
)
# What leads back to the entrance of a loop; then how many loops, and how many conditions, an operator leads into
# (+1) or out of (-1).
WAYS_BACK = ("NextIteration", "RefNextIteration")
_LOOPS = {"Enter": 1, "RefEnter": 1, "Exit": -1, "RefExit": -1}
_CONDITIONS = {"Switch": 1, "RefSwitch": 1, "_SwitchN": 1, "Merge": -1, "RefMerge": -1, "Exit": -1, "RefExit": -1}


class RunView(NamedTuple):
    """One kind of run of a graph.

    Attributes:
      name: name of the first thing it was asked for.
      purpose: what makes runs count as the same: the operators that change variables, or, where none does,
        what is fetched. Hooks that fetch more now and then do not make a training step another kind of run.
      ops: what is computed, every operator after those it needs.
      fed: the tensors whose value is given.
      values: names of the tensors that can be looked at, given ones included.
    """

    name: str
    purpose: frozenset
    ops: tuple
    fed: tuple
    values: frozenset


def view_of(graph: tf.Graph, fetches: Any, feed_dict: Any = None) -> RunView:
    """Finds out what a run computes.

    Args:
      graph: the session's graph.
      fetches, feed_dict: as given to `session.run`.
    """
    asked = elements_of(graph, fetches)
    given = tuple(tensor for tensor in elements_of(graph, list(feed_dict or ())) if isinstance(tensor, tf.Tensor))
    fed = {tensor.name for tensor in given}
    ops = computed_ops(asked, fed)
    writers = frozenset(op.name for op in ops if op.type.startswith(_WRITING))
    surely_run = _outside_of_control_flow(ops, fed)
    produced = [tensor for op in surely_run for tensor in op.outputs]
    return RunView(
        name=(asked[0] if isinstance(asked[0], tf.Operation) else asked[0].op).name if asked else "nothing",
        purpose=writers or frozenset(element.name for element in asked),
        ops=tuple(ops),
        fed=given,
        values=frozenset(tensor.name for tensor in [*produced, *given] if _has_plain_value(graph, tensor)),
    )


def elements_of(graph: tf.Graph, structure: Any) -> list:
    """The tensors and operators in anything `session.run` takes; what it would not take is left out."""
    if isinstance(structure, Mapping):
        parts: Iterable = structure.values()
    elif isinstance(structure, (list, tuple)):
        parts = structure
    else:
        leaves = tf.nest.flatten(structure, expand_composites=True)
        return [element for leaf in leaves for element in _element(graph, leaf)]
    return [element for part in parts for element in elements_of(graph, part)]


def computed_ops(elements: Iterable, fed: frozenset | set = frozenset()) -> list:
    """The operators that have to run for some tensors and operators, every one after those it needs.

    The body of a TF 1 loop, which leads back to the loop's entrance, comes after everything else.

    Args:
      elements: tensors and operators.
      fed: names of tensors whose value is given.
    """
    order: list = []
    seen: set = set()
    roots = _ops_behind(elements, fed)
    while roots:
        later: list = []
        stack = [(op, False) for op in reversed(roots)]
        while stack:
            op, is_ready = stack.pop()
            if is_ready:
                order.append(op)
            elif op not in seen:
                seen.add(op)
                stack.append((op, True))
                needed = _needed_ops(op, fed)
                later.extend(other for other in needed if other.type in WAYS_BACK)
                stack.extend((other, False) for other in reversed(needed) if other.type not in WAYS_BACK)
        roots = [op for op in later if op not in seen]
    return order


def _needed_ops(op, fed):
    return [*_ops_behind(op.inputs, fed), *op.control_inputs]


def _ops_behind(elements, fed):
    return [
        element if isinstance(element, tf.Operation) else element.op
        for element in elements
        if isinstance(element, tf.Operation) or element.name not in fed
    ]


def _outside_of_control_flow(ops, fed):
    """Those of the operators, given in order, that are in no TF 1 loop and on no side of a condition."""
    depths: dict = {}
    outside = []
    for op in ops:
        known = [depths[other] for other in _needed_ops(op, fed) if other in depths]  # not known: a way back
        loops = max((depth[0] for depth in known), default=0) + _LOOPS.get(op.type, 0)
        conditions = max((depth[1] for depth in known), default=0) + _CONDITIONS.get(op.type, 0)
        depths[op] = (max(loops, 0), max(conditions, 0))
        if depths[op] == (0, 0):
            outside.append(op)
    return outside


def _has_plain_value(graph, tensor) -> bool:
    dtype = tensor.dtype
    is_number = dtype.is_floating or dtype.is_integer or dtype.is_complex or dtype.is_bool
    is_reference = dtype.base_dtype != dtype
    return is_number and not is_reference and dtype.name not in ("int4", "uint4") and graph.is_fetchable(tensor)


def _element(graph, leaf):
    try:
        return [graph.as_graph_element(leaf, allow_tensor=True, allow_operation=True)]
    except (KeyError, TypeError, ValueError):
        return []
