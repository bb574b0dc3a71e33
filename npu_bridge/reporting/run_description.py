"""Formats the first line of a run: TensorFlow's version, devices, ranks and precision."""

from __future__ import annotations

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base.machine import usable_cores
from npu_bridge.reporting.progress_line import format_count


def describe_run(precision: str = "the graph's own dtypes") -> str:
    """Returns one line that describes TensorFlow's version, devices, ranks and precision.

    An example: `TensorFlow 2.15.1 | 2 CPU cores | 4 ranks, 2 on this machine | precision: the graph's own dtypes`.

    Args:
      precision: the dtypes of the run, in words.
    Raises:
      RuntimeError: the environment declares another number of ranks.
    """
    ranks = collective.current()
    gpus = len(tf.config.list_physical_devices("GPU"))
    devices = [format_count(gpus, "GPU")] if gpus else []
    devices.append(format_count(usable_cores(), "CPU core"))
    placement = "one process" if ranks.size == 1 else f"{ranks.size} ranks"
    if ranks.local_size < ranks.size:  # otherwise it is obvious, and a line has only 80 columns
        placement += f", {ranks.local_size} on this machine"
    return f"TensorFlow {tf.__version__} | {', '.join(devices)} | {placement} | precision: {precision}"
