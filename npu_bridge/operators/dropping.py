"""Implements dropout whose second argument is the probability to keep an element."""

from __future__ import annotations

import numbers
from typing import Any

from npu_bridge.base.arguments import check_number
from npu_bridge.base.errors import message
from npu_bridge.base.own_tensorflow import tf

_MASK_BITS = 128  # the length of a device's masks is a multiple of this


def dropout(x: Any, keep_prob: Any, noise_shape: Any, seed: int | None, name: str | None, where: str) -> tf.Tensor:
    """Keeps elements with a probability and multiplies them by its inverse; the others become 0."""
    x = _floating(x, where)
    _check_probability(keep_prob, "keep_prob", where)
    if isinstance(keep_prob, float) and keep_prob == 1.0:
        return x
    if not isinstance(keep_prob, numbers.Real):
        keep_prob = tf.stop_gradient(tf.cast(keep_prob, x.dtype))
    return tf.nn.dropout(x, 1 - keep_prob, noise_shape=noise_shape, seed=seed, name=name)


def keep_mask(
    x: Any, keep_prob: Any, noise_shape: Any, seed: int | None, dtype: Any, name: str | None, where: str
) -> tf.Tensor:
    """Returns True, or 1, where `dropout` would keep an element."""
    x = _floating(x, where)
    _check_probability(keep_prob, "keep_prob", where)
    with tf.name_scope(name or "keep_mask"):
        shape = tf.shape(x) if noise_shape is None else noise_shape
        return tf.cast(tf.random.uniform(shape, seed=seed) < tf.cast(keep_prob, tf.float32), dtype)


def stateless_dropout(x: Any, noise_shape: Any, drop_prob: Any, seed: Any, offset: Any, where: str) -> tf.Tensor:
    """Drops elements with a probability; the same seed and offset always drop the same elements."""
    x = _floating(x, where)
    if isinstance(drop_prob, numbers.Real):
        _check_probability(1 - drop_prob, "1 - p", where)
    rate = tf.stop_gradient(tf.cast(drop_prob, x.dtype))
    return tf.nn.experimental.stateless_dropout(x, rate, stateless_seed(seed, offset), noise_shape=noise_shape)


def packed_mask(shape: Any, keep_prob: Any, seed: int = 0, seed2: int = 0, name: str | None = None) -> tf.Tensor:
    """Returns a mask of kept elements as bits: eight in a byte, the first lowest, padded to a multiple of 128.

    Args:
      shape: of the masked tensor, a list or an integer tensor.
      keep_prob: probability to keep an element.
      seed, seed2: both 0 for a new choice each time.
      name: scope of the ops.
    Returns:
      Vector of uint8, for `masked_by_bits`.
    """
    with tf.name_scope(name or "packed_mask"):
        count = tf.reduce_prod(tf.cast(shape, tf.int32))
        is_kept = _choice([count], keep_prob, seed, seed2)
        bits = tf.reshape(tf.pad(tf.cast(is_kept, tf.uint8), [[0, -count % _MASK_BITS]]), [-1, 8])
        return tf.reduce_sum(tf.bitwise.left_shift(bits, _bit_numbers()), axis=1)


def byte_mask(shape: Any, keep_prob: Any, seed: int = 0, seed2: int = 0, name: str | None = None) -> tf.Tensor:
    """Returns a mask as `packed_mask` does, with a byte for each element, in the shape of the masked tensor."""
    with tf.name_scope(name or "byte_mask"):
        return tf.cast(_choice(shape, keep_prob, seed, seed2), tf.uint8)


def masked_by_bits(x: Any, mask: Any, keep_prob: Any, name: str | None = None) -> tf.Tensor:
    """Divides the elements that a `packed_mask` keeps by the probability to keep them; the others become 0.

    Args:
      x: float tensor.
      mask: made for the shape of x.
      keep_prob: the probability with which the mask was made.
      name: scope of the ops.
    Returns:
      Tensor of the shape and dtype of x.
    """
    x = tf.convert_to_tensor(x)
    with tf.name_scope(name or "masked"):
        bits = tf.bitwise.bitwise_and(tf.bitwise.right_shift(mask[:, None], _bit_numbers()), 1)
        return masked_by_bytes(x, tf.reshape(tf.reshape(bits, [-1])[: tf.size(x)], tf.shape(x)), keep_prob)


def masked_by_bytes(x: Any, mask: Any, keep_prob: Any, name: str | None = None) -> tf.Tensor:
    """Masks elements as `masked_by_bits` does, with a `byte_mask`."""
    x = tf.convert_to_tensor(x)
    with tf.name_scope(name or "masked"):
        return x * tf.cast(mask, x.dtype) / tf.stop_gradient(tf.cast(keep_prob, x.dtype))


def _bit_numbers():
    return tf.constant([*range(8)], tf.uint8)  # a list, because a graph cannot convert a range


def _choice(shape, keep_prob, seed, seed2):
    drawn = tf.raw_ops.RandomUniform(shape=tf.cast(shape, tf.int32), dtype=tf.float32, seed=seed, seed2=seed2)
    return drawn < tf.cast(keep_prob, tf.float32)


def stateless_seed(seed: Any, offset: Any) -> tf.Tensor:
    """Returns two integers as the seed of TensorFlow's stateless random operators."""
    return tf.stack([tf.cast(tf.reshape(part, []), tf.int64) for part in (seed, offset)])


def _floating(x: Any, where: str) -> tf.Tensor:
    x = tf.convert_to_tensor(x)
    if not x.dtype.is_floating:
        raise ValueError(message(where, "x cannot be scaled", "a float tensor", x.dtype.name, "Cast it."))
    return x


def _check_probability(value: Any, name: str, where: str) -> None:
    """Raises ValueError for a number outside (0, 1]; does not check a tensor."""
    if isinstance(value, numbers.Real):
        fix = "It is the probability to keep an element, not to drop it."
        check_number(where, name, +value, fix, above=0, at_most=1)  # + turns True into 1
