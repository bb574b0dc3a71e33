"""Packs tensors of any dtypes into one vector of 64-bit words, and back, so that one collective sends all of them.

The vector has 64-bit words and not bytes, because a collective counts its elements with 32 bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from npu_bridge.base.own_tensorflow import tf

_WORD_BYTES = 8


def pack_tensors(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Packs tensors: returns their bytes, one tensor after the other, as a vector of int64, padded with zeros."""
    whole = tf.concat([_tensor_to_bytes(tensor) for tensor in tensors] or [tf.zeros([0], tf.uint8)], axis=0)
    filled = tf.pad(whole, [[0, -tf.size(whole) % _WORD_BYTES]])
    return tf.bitcast(tf.reshape(filled, [-1, _WORD_BYTES]), tf.int64)


def unpack_tensors(words: tf.Tensor, specs: Sequence[Sequence[tf.TensorSpec]]) -> list[list[tf.Tensor]]:
    """Unpacks consecutive results of `pack_tensors`; an item of `specs` has the shapes and dtypes of a result."""
    sizes = [[spec.shape.num_elements() * spec.dtype.size for spec in each] for each in specs]
    fills = [-sum(each) % _WORD_BYTES for each in sizes]
    lengths = [length for each, fill in zip(sizes, fills) for length in (*each, fill)]
    parts = iter(tf.split(tf.reshape(tf.bitcast(words, tf.uint8), [-1]), lengths))
    lists = []
    for each in specs:
        lists.append([_tensor_from_bytes(next(parts), spec) for spec in each])
        next(parts)  # the padding of the last word
    return lists


def _tensor_to_bytes(tensor):
    if tensor.dtype == tf.bool:
        tensor = tf.cast(tensor, tf.uint8)
    return tf.reshape(tf.bitcast(tf.reshape(tensor, [-1]), tf.uint8), [-1])


def _tensor_from_bytes(part, spec):
    if spec.dtype == tf.bool:
        value = tf.cast(part, tf.bool)
    else:
        size = spec.dtype.size
        value = tf.bitcast(part if size == 1 else tf.reshape(part, [-1, size]), spec.dtype)
    return tf.reshape(value, spec.shape)
