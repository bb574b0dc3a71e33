"""Counts the operators that TensorFlow has really lowered, in the graphs that it has executed.

TensorFlow's rewriter sometimes lowers nothing: on a CPU without AVX512 it does not support bfloat16, or a graph has no
operator of its lists. So the first training step in a low precision also returns the graphs that TensorFlow executed.
This changes neither the script's graph nor the results of the step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from npu_bridge.base.tf_internals.sessions import (
    collected_function_graphs,
    empty_buffer,
    is_graph_trace_on,
    read_content,
    run_options_buffer,
)

# Operator types that have a dtype but compute nothing.
PASSING_TYPES = frozenset(
    {"Cast", "Const", "Identity", "IdentityN", "_Arg", "_Retval", "_Recv", "_Send", "Switch", "Merge"}
)


class OperatorCounts(NamedTuple):
    """Counts of a step's floating-point operators: those that compute in the low dtype, and all."""

    lowered: int
    total: int

    def add(self, other: OperatorCounts) -> OperatorCounts:
        """Returns the sum of two counts."""
        return OperatorCounts(self.lowered + other.lowered, self.total + other.total)


class ExecutedGraphs:
    """Holds the graphs that TensorFlow has executed for a run; empty until the run is over."""

    def __init__(self):
        self.graphs: list[Any] = []

    def count(self, low_dtype: str) -> OperatorCounts | None:
        """Counts the operators, including those in functions; returns None if there is no graph."""
        nodes = [node for graph in self.graphs for node in graph.node]
        nodes += [node for graph in self.graphs for function in graph.library.function for node in function.node_def]
        return count_operators(nodes, low_dtype) if self.graphs else None


def count_operators(nodes: Iterable[Any], low_dtype: str) -> OperatorCounts:
    """Counts, among `NodeDef`s, the lowered operators and all floating-point operators."""
    computing = [node for node in nodes if node.op not in PASSING_TYPES and "T" in node.attr and node.attr["T"].type]
    dtypes = [tf.as_dtype(node.attr["T"].type) for node in computing]
    lowered = sum(dtype.name == low_dtype for dtype in dtypes)
    return OperatorCounts(lowered, sum(dtype.is_floating for dtype in dtypes))


@contextlib.contextmanager
def request_executed_graphs(options: Any, metadata: Any) -> Iterator[tuple[Any, Any, ExecutedGraphs]]:
    """Yields options and metadata to run a session with, and an object that holds the executed graphs after the block.

    Args:
      options, metadata: run options and metadata of the caller, as buffers or None. The yielded options also request
        the executed graphs.
    """
    graphs = ExecutedGraphs()
    wanted = tf.compat.v1.RunOptions() if options is None else tf.compat.v1.RunOptions.FromString(read_content(options))
    wanted.output_partition_graphs = True
    with run_options_buffer(wanted) as asking, empty_buffer() as own:
        metadata = own if metadata is None else metadata
        yield asking, metadata, graphs
        graphs.graphs = list(tf.compat.v1.RunMetadata.FromString(read_content(metadata)).partition_graphs)


@contextlib.contextmanager
def collect_executed_graphs() -> Iterator[ExecutedGraphs]:
    """Yields an object that holds, after the block, the executed graphs of functions built in the block.

    The object stays empty if the script collects graphs itself, because TensorFlow returns the graphs only once.
    """
    graphs = ExecutedGraphs()
    if is_graph_trace_on():
        yield graphs
        return
    with collected_function_graphs() as metadata:
        yield graphs
    graphs.graphs = [graph for function in metadata.function_graphs for graph in function.partition_graphs]
