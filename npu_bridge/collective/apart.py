"""Runs collective operations in a separate graph and session, whether or not the caller is building a graph.

The separate session uses no GPUs, which it would otherwise configure before the caller's first session. It has its own
threads, because the first session of a process fixes the number of shared threads (TensorFlow 2.15).
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable

import tensorflow as tf

from npu_bridge.collective import wire_names


class SeparateGraph:
    """Operations in a separate graph and session, which can run more than once.

    Args:
      operations: called once, with a placeholder for each of `specs`; returns the fetches.
      specs: arrays or specs with the dtypes and shapes of the fed values.
    """

    def __init__(self, operations: Callable[..., Any], *specs: Any):
        config = tf.compat.v1.ConfigProto(
            device_count={"GPU": 0}, inter_op_parallelism_threads=2, use_per_session_threads=True
        )
        # The operations belong to the training for which they are made.
        with (
            wire_names.use_label(wire_names.current_collectives_label()),
            tf.Graph().as_default() as graph,
            tf.device("/cpu:0"),
        ):
            self._given = [tf.compat.v1.placeholder(spec.dtype, spec.shape) for spec in specs]
            self._made = operations(*self._given)
        self._session = tf.compat.v1.Session(graph=graph, config=config)

    def run(self, *values: Any) -> Any:
        """Feeds `values`, in the order of `specs`, and returns the fetched values, as `session.run` does."""
        return self._session.run(self._made, dict(zip(self._given, values)))

    def close(self) -> None:
        """Closes the session."""
        self._session.close()


def run_in_separate_graph(operations: Callable[..., Any], *values: Any) -> Any:
    """Runs operations once in a separate graph, on arrays, and returns the results; see `SeparateGraph`."""
    with contextlib.closing(SeparateGraph(operations, *values)) as apart:
        return apart.run(*values)
