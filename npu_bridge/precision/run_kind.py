"""What one `session.run` is for precision: which operators it computes, and which variables it trains."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

import tensorflow as tf

from npu_bridge.graph.operators import computed_ops
from npu_bridge.graph.variables import trained_variables


class RunKind(NamedTuple):
    """One kind of run of a graph.

    Attributes:
      trained: names of the trainable variables it trains, empty when it does not train. Runs that train the same
        variables are the same training, whatever else hooks fetch now and then.
      ops: the operators it computes, sorted by name.
    """

    trained: frozenset[str]
    ops: tuple[tf.Operation, ...]

    @property
    def is_training(self) -> bool:
        """Whether the run changes trainable variables by what it computes from them."""
        return bool(self.trained)


def kind_of(graph: tf.Graph, asked: Iterable[tf.Operation], fed: Collection[str] = ()) -> RunKind:
    """Finds out what a run does.

    Args:
      graph: the session's graph.
      asked: the operators that are run or fetched from.
      fed: names of tensors whose value is given.
    """
    ops = sorted(computed_ops(asked, frozenset(fed)), key=lambda op: op.name)
    return RunKind(trained_variables(graph, ops), tuple(ops))
