"""A view of a graph for passes: who uses what, and what comes before what. Built in one walk over all ops."""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf


class GraphIndex:
    """The ops of a graph as they are now; ops that are added later are unknown to it.

    Args:
      graph: a TF 1 graph.
    Attributes:
      ops: all of them, in the order they were made.
    """

    def __init__(self, graph: tf.Graph):
        self.ops = graph.get_operations()
        self._readers: dict[str, list] = {}
        self._data_users: dict[str, list] = {op.name: [] for op in self.ops}
        for op in self.ops:
            for position, tensor in enumerate(op.inputs):
                self._readers.setdefault(tensor.name, []).append((op, position))
                self._data_users[tensor.op.name].append(op)

    def readers(self, tensor: tf.Tensor) -> list:
        """Pairs of (op, position among its inputs) that read a tensor."""
        return list(self._readers.get(tensor.name, ()))

    def users(self, op: tf.Operation) -> list:
        """Ops that read one of its outputs, one entry per reading."""
        return self._data_users.get(op.name, [])

    def followers(self, ops: Iterable[tf.Operation]) -> set:
        """Names of the ops that are computed from some of these, through data alone; these included."""
        return self._spread(ops, self.users)

    def ancestors(self, ops: Iterable[tf.Operation], through_control: bool = False) -> set:
        """Names of the ops these are computed from, these included.

        Args:
          ops: where to start.
          through_control: count control edges, too: then it is all that these wait for.
        """

        def before(op):
            waited = [tensor.op for tensor in op.inputs]
            return [*waited, *op.control_inputs] if through_control else waited

        return self._spread(ops, before)

    @staticmethod
    def _spread(ops, neighbours):
        reached, frontier = set(), list(ops)
        while frontier:
            op = frontier.pop()
            if op.name not in reached:
                reached.add(op.name)
                frontier.extend(neighbours(op))
        return reached
