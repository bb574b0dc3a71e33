"""`tf.contrib.nccl`: reductions over the devices of one process, as plain sums."""

from __future__ import annotations

import tensorflow.compat.v1 as tf


def _for_all(combine, tensors):
    combined = combine(tensors)
    results = []
    for tensor in tensors:
        with tf.device(tensor.device):
            results.append(tf.identity(combined))
    return results


def all_sum(tensors):
    """Returns the sum, once for each device."""
    return _for_all(tf.add_n, tensors)


def all_prod(tensors):
    """Returns the product, once for each device."""
    return _for_all(lambda each: tf.reduce_prod(tf.stack(each), 0), tensors)


def all_min(tensors):
    """Returns the least values, once for each device."""
    return _for_all(lambda each: tf.reduce_min(tf.stack(each), 0), tensors)


def all_max(tensors):
    """Returns the greatest values, once for each device."""
    return _for_all(lambda each: tf.reduce_max(tf.stack(each), 0), tensors)


def reduce_sum(tensors):
    """Returns the sum."""
    return tf.add_n(tensors)


def broadcast(tensor):
    """Returns the tensor unchanged; TensorFlow copies it to its readers."""
    return tf.identity(tensor)
