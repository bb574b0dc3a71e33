"""Counts the operators that TensorFlow has really lowered, in the graphs it executes.

TensorFlow's rewriter may lower nothing: on a CPU without AVX512 it knows no bfloat16, and a graph may hold no operator
of its lists. So the first training step to be lowered returns the graphs that TensorFlow executed. This changes neither
the graph of the script nor the step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from npu_bridge.base.tf_internals.sessions import (
    collected_function_graphs,
    empty_buffer,
    is_traced,
    read_content,
    run_options_buffer,
)

# They have one dtype, but compute nothing.
MOVING = frozenset({"Cast", "Const", "Identity", "IdentityN", "_Arg", "_Retval", "_Recv", "_Send", "Switch", "Merge"})


class Executed(NamedTuple):
    """The number of a step's floating-point operators that compute in the low dtype, and of all of them."""

    lowered: int
    total: int

    def plus(self, other: Executed) -> Executed:
        """Returns the sum of both."""
        return Executed(self.lowered + other.lowered, self.total + other.total)


class Answer:
    """The graphs that a run was executed as, present once the run is over."""

    def __init__(self):
        self.graphs: list[Any] = []

    def count(self, low_dtype: str) -> Executed | None:
        """Counts the operators, those in called functions included; returns None without a graph."""
        nodes = [node for graph in self.graphs for node in graph.node]
        nodes += [node for graph in self.graphs for function in graph.library.function for node in function.node_def]
        return count(nodes, low_dtype) if self.graphs else None


def count(nodes: Iterable[Any], low_dtype: str) -> Executed:
    """Counts the floating-point operators among some `NodeDef`s."""
    computing = [node for node in nodes if node.op not in MOVING and "T" in node.attr and node.attr["T"].type]
    dtypes = [tf.as_dtype(node.attr["T"].type) for node in computing]
    lowered = sum(dtype.name == low_dtype for dtype in dtypes)
    return Executed(lowered, sum(dtype.is_floating for dtype in dtypes))


@contextlib.contextmanager
def asked_run(options: Any, metadata: Any) -> Iterator[tuple[Any, Any, Answer]]:
    """Yields options and metadata for a session's run, and the answer that holds its graphs afterwards.

    Args:
      options, metadata: those of the run, as buffers or None; the yielded ones ask for the graphs as well.
    """
    answer = Answer()
    wanted = tf.compat.v1.RunOptions() if options is None else tf.compat.v1.RunOptions.FromString(read_content(options))
    wanted.output_partition_graphs = True
    with run_options_buffer(wanted) as asking, empty_buffer() as own:
        metadata = own if metadata is None else metadata
        yield asking, metadata, answer
        answer.graphs = list(tf.compat.v1.RunMetadata.FromString(read_content(metadata)).partition_graphs)


@contextlib.contextmanager
def asked_call() -> Iterator[Answer]:
    """Yields the answer that holds, after the block, the graphs of the functions built by calls in it.

    It stays empty if the script collects graphs itself: TensorFlow returns them only once.
    """
    answer = Answer()
    if is_traced():
        yield answer
        return
    with collected_function_graphs() as metadata:
        yield answer
    answer.graphs = [graph for function in metadata.function_graphs for graph in function.partition_graphs]
