"""Tensors of any dtypes as one vector of 64-bit words, and back: so that one transfer sends all of them.

Words, because a transfer counts its elements with 32 bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

_WORD_BYTES = 8


def packed(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """The tensors' bytes one after the other, as a vector of int64, the last one filled up with zeros."""
    whole = tf.concat([_bytes(tensor) for tensor in tensors] or [tf.zeros([0], tf.uint8)], axis=0)
    filled = tf.pad(whole, [[0, -tf.size(whole) % _WORD_BYTES]])
    return tf.bitcast(tf.reshape(filled, [-1, _WORD_BYTES]), tf.int64)


def unpacked(words: tf.Tensor, specs: Sequence[Sequence[tf.TensorSpec]]) -> list[list[tf.Tensor]]:
    """What `packed` gave for several lists of tensors, one after the other, of these static shapes and dtypes."""
    sizes = [[spec.shape.num_elements() * spec.dtype.size for spec in each] for each in specs]
    fills = [-sum(each) % _WORD_BYTES for each in sizes]
    lengths = [length for each, fill in zip(sizes, fills) for length in (*each, fill)]
    parts = iter(tf.split(tf.reshape(tf.bitcast(words, tf.uint8), [-1]), lengths))
    lists = []
    for each in specs:
        lists.append([_from_bytes(next(parts), spec) for spec in each])
        next(parts)  # what the last word was filled up with
    return lists


def _bytes(tensor):
    if tensor.dtype == tf.bool:
        tensor = tf.cast(tensor, tf.uint8)
    return tf.reshape(tf.bitcast(tf.reshape(tensor, [-1]), tf.uint8), [-1])


def _from_bytes(part, spec):
    if spec.dtype == tf.bool:
        value = tf.cast(part, tf.bool)
    else:
        size = spec.dtype.size
        value = tf.bitcast(part if size == 1 else tf.reshape(part, [-1, size]), spec.dtype)
    return tf.reshape(value, spec.shape)
