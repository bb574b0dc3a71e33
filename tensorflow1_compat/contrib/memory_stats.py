"""`tf.contrib.memory_stats`: the memory of the first GPU, or of the process without a GPU."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from npu_bridge.base.machine import memory_now, peak_memory


def _measured(name, of_gpu, of_process):
    def measure():
        if tf.config.list_physical_devices("GPU"):
            return tf.config.experimental.get_memory_info("GPU:0")[of_gpu]
        return of_process() or 0

    tensor = tf.py_func(measure, [], tf.int64, name=name)
    tensor.set_shape([])
    return tensor


def BytesInUse():
    """Returns the bytes in use: an int64 scalar, measured anew in each run."""
    return _measured("BytesInUse", "current", memory_now)


def MaxBytesInUse():
    """Returns the peak of `BytesInUse`, measured likewise."""
    return _measured("MaxBytesInUse", "peak", peak_memory)
