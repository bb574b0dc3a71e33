"""Runs collective operations in a separate graph and session: the caller might be building a graph, or have none.

Such a session leaves GPUs to the caller's first session, and has its own threads: the shared threads of a process are
as many as its first session asks for (TensorFlow 2.15).
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable

import tensorflow as tf

from npu_bridge.collective import wire_names


class GraphApart:
    """Operations in a separate graph, which can run more than once.

    Args:
      operations: called once, with a placeholder for each of `specs`; returns the fetches.
      specs: objects with the dtypes and shapes of the fed values, such as arrays.
    """

    def __init__(self, operations: Callable[..., Any], *specs: Any):
        config = tf.compat.v1.ConfigProto(
            device_count={"GPU": 0}, inter_op_parallelism_threads=2, use_per_session_threads=True
        )
        # The operations belong to the training for which they are made.
        with wire_names.labelled(wire_names.label()), tf.Graph().as_default() as graph, tf.device("/cpu:0"):
            self._given = [tf.compat.v1.placeholder(spec.dtype, spec.shape) for spec in specs]
            self._made = operations(*self._given)
        self._session = tf.compat.v1.Session(graph=graph, config=config)

    def run(self, *values: Any) -> Any:
        """Returns the fetched values, as `session.run` does; `values` are in the order of `specs`."""
        return self._session.run(self._made, dict(zip(self._given, values)))

    def close(self) -> None:
        """Ends the session."""
        self._session.close()


def run_apart(operations: Callable[..., Any], *values: Any) -> Any:
    """Runs operations once on some arrays, and returns their results; see `GraphApart`."""
    with contextlib.closing(GraphApart(operations, *values)) as apart:
        return apart.run(*values)
