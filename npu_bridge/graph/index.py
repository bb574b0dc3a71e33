"""Keeps a snapshot of a graph for passes that change it: the readers of each tensor, and all dependencies."""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf

from npu_bridge.base.search import search
from npu_bridge.graph.operators import producers


class GraphIndex:
    """The current operators of a graph; those that are added later are unknown to it.

    Args:
      graph: a TF 1 graph.
    Attributes:
      ops: all operators, in the order in which they were made.
    """

    def __init__(self, graph: tf.Graph):
        self.ops = graph.get_operations()
        self._readers: dict[str, list] = {}
        for op in self.ops:
            for position, tensor in enumerate(op.inputs):
                self._readers.setdefault(tensor.name, []).append((op, position))

    def readers(self, tensor: tf.Tensor) -> list:
        """Returns the pairs of (op, position among its inputs) that read a tensor."""
        return list(self._readers.get(tensor.name, ()))

    def users(self, op: tf.Operation) -> list:
        """Returns the ops that read one of its outputs, one entry per reading."""
        return [reader for tensor in op.outputs for reader, _ in self.readers(tensor)]

    def followers(self, ops: Iterable[tf.Operation]) -> set:
        """Returns names of the ops that depend on some of these through data alone, these included."""
        return {op.name for op in search(ops, self.users)}

    def ancestors(self, ops: Iterable[tf.Operation]) -> set:
        """Returns names of the ops that these depend on through data alone, these included."""
        return {op.name for op in search(ops, lambda op: producers(op.inputs))}
