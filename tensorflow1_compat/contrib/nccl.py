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
    """The sum, for each device."""
    return _for_all(tf.add_n, tensors)


def all_prod(tensors):
    """The product, for each device."""
    return _for_all(lambda each: tf.reduce_prod(tf.stack(each), 0), tensors)


def all_min(tensors):
    """The least values, for each device."""
    return _for_all(lambda each: tf.reduce_min(tf.stack(each), 0), tensors)


def all_max(tensors):
    """The greatest values, for each device."""
    return _for_all(lambda each: tf.reduce_max(tf.stack(each), 0), tensors)


def reduce_sum(tensors):
    """The sum."""
    return tf.add_n(tensors)


def broadcast(tensor):
    """The tensor; TensorFlow copies it to whoever reads it."""
    return tf.identity(tensor)
