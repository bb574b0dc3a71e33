"""Following tensors back to the tensors they were computed from."""

from __future__ import annotations

from collections.abc import Sequence
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
