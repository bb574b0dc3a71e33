"""`tf.contrib.memory_stats`: memory in use on the first GPU; without a GPU, memory of the process."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from npu_bridge.base.machine import current_memory_bytes, peak_memory


def _make_measurement(name, gpu_key, measure_process):
    def measure():
        if tf.config.list_physical_devices("GPU"):
            return tf.config.experimental.get_memory_info("GPU:0")[gpu_key]
        return measure_process() or 0

    tensor = tf.py_func(measure, [], tf.int64, name=name)
    tensor.set_shape([])
    return tensor


def BytesInUse():
    """Returns the number of bytes in use, an int64 scalar that each session run measures again."""
    return _make_measurement("BytesInUse", "current", current_memory_bytes)


def MaxBytesInUse():
    """Returns the peak number of bytes in use, an int64 scalar that each session run measures again."""
    return _make_measurement("MaxBytesInUse", "peak", peak_memory)
