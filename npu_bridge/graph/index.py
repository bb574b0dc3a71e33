"""Keeps a snapshot of a graph, for code that changes the graph: the readers of each tensor, and all dependencies."""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf

from npu_bridge.base.search import search
from npu_bridge.graph.operators import producers


class GraphIndex:
    """A snapshot of the operators of a graph; operators added later are not in it.

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
        """Returns an (op, position among the op's inputs) pair for each read of a tensor."""
        return list(self._readers.get(tensor.name, ()))

    def users(self, op: tf.Operation) -> list:
        """Returns the ops that read an output of `op`, one entry per read."""
        return [reader for tensor in op.outputs for reader, _ in self.readers(tensor)]

    def descendants(self, ops: Iterable[tf.Operation]) -> set:
        """Returns the names of `ops` and of all ops that depend on their outputs; control dependencies do not count."""
        return {op.name for op in search(ops, self.users)}

    def ancestors(self, ops: Iterable[tf.Operation]) -> set:
        """Returns the names of `ops` and of all ops that they depend on; ignores control inputs."""
        return {op.name for op in search(ops, lambda op: producers(op.inputs))}
