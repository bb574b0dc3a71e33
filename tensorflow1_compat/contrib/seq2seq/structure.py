"""Defines functions for nested tensors that decoders and helpers share."""

from __future__ import annotations

import tensorflow.compat.v1 as tf


def read_only(name):
    """Returns a property that gives a private attribute, which subclasses in scripts read as in TensorFlow 1.15."""
    return property(lambda self: getattr(self, name))


def make_lookup_function(embedding):
    """Returns a function from ids to embeddings, given such a function or an embedding table."""
    return embedding if callable(embedding) else lambda ids: tf.nn.embedding_lookup(embedding, ids)


def unstack_ta(tensor):
    """Returns a TensorArray with the entries of a tensor along its first axis."""
    array = tf.TensorArray(tensor.dtype, size=tf.shape(tensor)[0], element_shape=tensor.shape[1:])
    return array.unstack(tensor)


def select_rows(condition, rows_if_true, rows_if_false):
    """Returns the rows of `rows_if_true` where `condition` [batch] is true, else the rows of `rows_if_false`."""
    rank = rows_if_true.shape.rank
    shape = tf.concat([tf.shape(condition), tf.ones([max(rank - 1, 0)], tf.int32)], 0)
    mask = tf.reshape(condition, shape) if rank else condition
    result = tf.compat.v2.where(mask, rows_if_true, rows_if_false)
    result.set_shape(rows_if_false.shape)
    return result
