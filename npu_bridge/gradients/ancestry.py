"""Following tensors back to the tensors they were computed from, and on to the variables they are used for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf


def sources_of(results: Sequence[Any], candidates: Sequence[Any]) -> list:
    """Those candidates that some result is computed from, through data alone.

    A gradient read back from an accumulator variable is not computed from this step's gradients, and one that was
    clipped is. Executed eagerly nothing is recorded, so all candidates are taken as sources.

    Args:
      results: dense or sparse tensors.
      candidates: dense or sparse tensors of the same graph.
    Returns:
      Sub-list of `candidates`, in order.
    """
    if not results or not candidates or tf.executing_eagerly():
        return list(candidates) if results else []
    sought = {id(part.op) for candidate in candidates for part in _parts(candidate)}
    reached = set()
    visited = set()
    frontier = [part.op for result in results for part in _parts(result)]
    while frontier:
        op = frontier.pop()
        if id(op) in visited:
            continue
        visited.add(id(op))
        if id(op) in sought:
            reached.add(id(op))  # what lies behind a candidate made the candidate, not the result
        else:
            frontier.extend(tensor.op for tensor in op.inputs)
    return [candidate for candidate in candidates if any(id(part.op) in reached for part in _parts(candidate))]


def _parts(grad):
    return (grad.values, grad.indices) if isinstance(grad, tf.IndexedSlices) else (grad,)


def variables_updated_from(values: Iterable) -> list:
    """The trainable variables of a TF 1 graph that some tensors are used to update, in the order of their making.

    Args:
      values: tensors and `tf.IndexedSlices`.
    """
    stack = [part for value in values for part in tf.nest.flatten(value, expand_composites=True)]
    if not stack:
        return []
    trainable = stack[0].graph.get_collection(tf.compat.v1.GraphKeys.TRAINABLE_VARIABLES)
    by_name = {getattr(variable, "handle", variable).op.name: variable for variable in trainable}
    seen, updated = set(), set()
    while stack:
        for op in stack.pop().consumers():
            if op not in seen:
                seen.add(op)
                updated.update(tensor.op.name for tensor in op.inputs if tensor.op.name in by_name)
                stack.extend(op.outputs)
    return [variable for name, variable in by_name.items() if name in updated]
