"""Small work on nested tensors that decoders and helpers share."""

from __future__ import annotations

import tensorflow.compat.v1 as tf


def lookup_in(embedding):
    """What gives the embeddings of ids: a function as it is, or rows of a table."""
    return embedding if callable(embedding) else lambda ids: tf.nn.embedding_lookup(embedding, ids)


def unstack_ta(tensor):
    """A TensorArray of what a tensor holds along its first axis."""
    array = tf.TensorArray(tensor.dtype, size=tf.shape(tensor)[0], element_shape=tensor.shape[1:])
    return array.unstack(tensor)


def rows_where(condition, chosen, other):
    """Rows of `chosen` where the condition [batch] holds, else those of `other`."""
    rank = chosen.shape.rank
    shape = tf.concat([tf.shape(condition), tf.ones([max(rank - 1, 0)], tf.int32)], 0)
    mask = tf.reshape(condition, shape) if rank else condition
    result = tf.compat.v2.where(mask, chosen, other)
    result.set_shape(other.shape)
    return result
