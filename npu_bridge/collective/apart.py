"""Runs collective operations in a graph and a session of their own: the caller may be building a graph, or have none.

Such a session leaves GPUs to the caller's first one, and has threads of its own: the threads that sessions of a process
share are as many as the first of them asks for (TensorFlow 2.15).
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable

import tensorflow as tf

from npu_bridge.collective import wire_names


class GraphApart:
    """Operations in a graph of their own, to be run more than once.

    Args:
      operations: makes them, once; is called with a placeholder for each of `specs`, and returns what to fetch.
      specs: what has the dtype and the shape of what is fed, such as arrays.
    """

    def __init__(self, operations: Callable[..., Any], *specs: Any):
        config = tf.compat.v1.ConfigProto(
            device_count={"GPU": 0}, inter_op_parallelism_threads=2, use_per_session_threads=True
        )
        # They belong to the training for which they are made.
        with wire_names.labelled(wire_names.label()), tf.Graph().as_default() as graph, tf.device("/cpu:0"):
            self._given = [tf.compat.v1.placeholder(spec.dtype, spec.shape) for spec in specs]
            self._made = operations(*self._given)
        self._session = tf.compat.v1.Session(graph=graph, config=config)

    def run(self, *values: Any) -> Any:
        """What was to be fetched, as `session.run` gives it; values in the order of `specs`."""
        return self._session.run(self._made, dict(zip(self._given, values)))

    def close(self) -> None:
        """Ends the session."""
        self._session.close()


def run_apart(operations: Callable[..., Any], *values: Any) -> Any:
    """What operations give for some arrays, at once; see `GraphApart`."""
    with contextlib.closing(GraphApart(operations, *values)) as apart:
        return apart.run(*values)
