"""What one `session.run` computes, and which of its tensors can be looked at without changing anything.

A tensor is looked at by fetching it along with what the caller fetches. To leave the run as it is, only tensors
it computes anyway are fetched, and of those only the ones whose value is sure to exist: what runs inside a TF 1
loop, or on one side of a condition, cannot be fetched.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from npu_bridge.graph.control_flow import Depth, by_depth
from npu_bridge.graph.operators import computed_ops, elements_of
from npu_bridge.graph.variables import changes_variable


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
    writers = frozenset(op.name for op in ops if changes_variable(op.type))
    surely_run = by_depth(ops, fed).get(Depth(), [])
    produced = [tensor for op in surely_run for tensor in op.outputs]
    return RunView(
        name=(asked[0] if isinstance(asked[0], tf.Operation) else asked[0].op).name if asked else "nothing",
        purpose=writers or frozenset(element.name for element in asked),
        ops=tuple(ops),
        fed=given,
        values=frozenset(tensor.name for tensor in [*produced, *given] if _has_plain_value(graph, tensor)),
    )


def _has_plain_value(graph, tensor) -> bool:
    dtype = tensor.dtype
    is_number = dtype.is_floating or dtype.is_integer or dtype.is_complex or dtype.is_bool
    is_reference = dtype.base_dtype != dtype
    return is_number and not is_reference and dtype.name not in ("int4", "uint4") and graph.is_fetchable(tensor)
