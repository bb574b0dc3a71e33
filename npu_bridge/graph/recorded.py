"""Reads when each operator of a run was executed, from TensorFlow's record of the run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow as tf


class OperatorEvent(NamedTuple):
    """One execution of one operator.

    Attributes:
      name: name of the operator; an operator in a loop has an event for each execution.
      begin, end: microseconds since the epoch.
      size_bytes: size of the results; 0 if it was not recorded.
    """

    name: str
    begin: float
    end: float
    size_bytes: int = 0


def events_of(step_stats: Any) -> Iterator[OperatorEvent]:
    """Yields the events of a run, device by device.

    Args:
      step_stats: `RunMetadata.step_stats` of a run with a trace level.
    """
    for device in step_stats.dev_stats:
        for stats in device.node_stats:
            name = stats.node_name.partition(":")[0]
            if name == "_SOURCE":
                continue
            if stats.all_start_nanos:
                begin, length = stats.all_start_nanos / 1000, stats.all_end_rel_nanos / 1000
            else:
                begin, length = float(stats.all_start_micros), float(stats.all_end_rel_micros)
            yield OperatorEvent(name, begin, begin + length, sum(map(_size_bytes, stats.output)))


def _size_bytes(output):
    description = output.tensor_description
    width = tf.as_dtype(description.dtype).size if description.dtype else 0
    return width * math.prod(dimension.size for dimension in description.shape.dim)
