"""`tf.contrib.nccl`: reductions over tensors of one process, computed by plain TensorFlow operators."""

from __future__ import annotations

import tensorflow.compat.v1 as tf


def _reduce_for_each_device(combine, tensors):
    combined = combine(tensors)
    results = []
    for tensor in tensors:
        with tf.device(tensor.device):
            results.append(tf.identity(combined))
    return results


def all_sum(tensors):
    """Returns a list with the sum of the tensors for each device."""
    return _reduce_for_each_device(tf.add_n, tensors)


def all_prod(tensors):
    """Returns a list with the product of the tensors for each device."""
    return _reduce_for_each_device(lambda each: tf.reduce_prod(tf.stack(each), 0), tensors)


def all_min(tensors):
    """Returns a list with the elementwise minimum of the tensors for each device."""
    return _reduce_for_each_device(lambda each: tf.reduce_min(tf.stack(each), 0), tensors)


def all_max(tensors):
    """Returns a list with the elementwise maximum of the tensors for each device."""
    return _reduce_for_each_device(lambda each: tf.reduce_max(tf.stack(each), 0), tensors)


def reduce_sum(tensors):
    """Returns the sum of the tensors."""
    return tf.add_n(tensors)


def broadcast(tensor):
    """Returns the tensor unchanged; TensorFlow copies the tensor to devices that read it."""
    return tf.identity(tensor)
