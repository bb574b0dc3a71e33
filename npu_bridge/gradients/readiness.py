"""The order in which gradients become ready, and the fragments in which they travel."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from npu_bridge.collective import groups
from npu_bridge.gradients.dense_or_sparse import values_of

_LOG = logging.getLogger(__name__)


def fragments_of(gradients: Sequence[Any], names: Sequence[str], group: str = groups.WORLD) -> list[list[int]]:
    """Cuts the dense gradients into aggregation fragments, by the split strategy of the group.

    Args:
      gradients: dense tensors, `tf.IndexedSlices` or Nones.
      names: what each of them is the gradient of; for the log line that shows the order indices count in.
      group: the group whose ranks reduce them.
    Returns:
      Positions of the dense ones, one list per fragment, in the order they become ready.
    Raises:
      ValueError: the strategy by index reaches beyond the gradients.
    """
    dense = [position for position, grad in enumerate(gradients) if isinstance(grad, tf.Tensor)]
    ready = sorted(dense, key=readiness_of(gradients))
    strategy = groups.of_this_process().strategies.of(group)
    if strategy.last_indices is not None:
        _LOG.info(
            "Gradients of group %s in the order of set_split_strategy_by_idx: %s",
            group,
            ", ".join(f"{index} {names[position]}" for index, position in enumerate(ready)),
        )
    cut = strategy.cut([static_bytes(gradients[position]) for position in ready])
    return [[ready[index] for index in fragment] for fragment in cut]


def readiness_of(gradients):
    """A sort key for positions: the order in which the backward pass delivers the gradients.

    In a graph that is the order in which their ops were made, since backpropagation builds them from the loss
    down; executed eagerly, the reverse of the variables' order.
    """
    if tf.executing_eagerly():
        return lambda position: -position
    made = {op: number for number, op in enumerate(tf.compat.v1.get_default_graph().get_operations())}
    ops = [getattr(values_of(grad), "op", None) for grad in gradients]
    return lambda position: (made.get(ops[position], len(made)), position)


def static_bytes(tensor):
    """Bytes of a tensor as far as its static shape tells; 0 for an unknown shape."""
    return (tensor.shape.num_elements() or 0) * tensor.dtype.size
