"""Implements dropout and masks for dropout, with the probability to keep an element as an argument."""

from __future__ import annotations

import numbers
from typing import Any

from npu_bridge.base.arguments import check_number
from npu_bridge.base.errors import message
from npu_bridge.base.own_tensorflow import tf

_MASK_BITS = 128  # the length of a packed mask is a multiple of this, as on the device


def dropout(x: Any, keep_prob: Any, noise_shape: Any, seed: int | None, name: str | None, where: str) -> tf.Tensor:
    """Keeps each element with the probability `keep_prob` and divides it by `keep_prob`; sets the others to 0."""
    x = _check_float(x, where)
    _check_probability(keep_prob, "keep_prob", where)
    if isinstance(keep_prob, float) and keep_prob == 1.0:
        return x
    if not isinstance(keep_prob, numbers.Real):
        keep_prob = tf.stop_gradient(tf.cast(keep_prob, x.dtype))
    return tf.nn.dropout(x, 1 - keep_prob, noise_shape=noise_shape, seed=seed, name=name)


def keep_mask(
    x: Any, keep_prob: Any, noise_shape: Any, seed: int | None, dtype: Any, name: str | None, where: str
) -> tf.Tensor:
    """Returns a random mask: True, or 1 in a numeric dtype, for the elements that a dropout keeps."""
    x = _check_float(x, where)
    _check_probability(keep_prob, "keep_prob", where)
    with tf.name_scope(name or "keep_mask"):
        shape = tf.shape(x) if noise_shape is None else noise_shape
        return tf.cast(tf.random.uniform(shape, seed=seed) < tf.cast(keep_prob, tf.float32), dtype)


def stateless_dropout(x: Any, noise_shape: Any, drop_prob: Any, seed: Any, offset: Any, where: str) -> tf.Tensor:
    """Drops each element with the probability `drop_prob`; the same seed and offset always drop the same elements."""
    x = _check_float(x, where)
    if isinstance(drop_prob, numbers.Real):
        _check_probability(1 - drop_prob, "1 - p", where)
    rate = tf.stop_gradient(tf.cast(drop_prob, x.dtype))
    return tf.nn.experimental.stateless_dropout(x, rate, stateless_seed(seed, offset), noise_shape=noise_shape)


def draw_packed_mask(shape: Any, keep_prob: Any, seed: int = 0, seed2: int = 0, name: str | None = None) -> tf.Tensor:
    """Returns a random mask of kept elements, with eight elements in each byte, the first in the lowest bit.

    Args:
      shape: shape of the tensor to mask, a list or an integer tensor.
      keep_prob: probability to keep an element.
      seed, seed2: both 0 for a new choice each time.
      name: scope of the ops.
    Returns:
      Vector of uint8 for `apply_packed_mask`, padded to a multiple of 128 bits.
    """
    with tf.name_scope(name or "packed_mask"):
        count = tf.reduce_prod(tf.cast(shape, tf.int32))
        is_kept = _draw_keep_mask([count], keep_prob, seed, seed2)
        bits = tf.reshape(tf.pad(tf.cast(is_kept, tf.uint8), [[0, -count % _MASK_BITS]]), [-1, 8])
        return tf.reduce_sum(tf.bitwise.left_shift(bits, _bit_positions()), axis=1)


def draw_byte_mask(shape: Any, keep_prob: Any, seed: int = 0, seed2: int = 0, name: str | None = None) -> tf.Tensor:
    """Returns a random mask of kept elements, with a byte for each element, in the shape of the tensor to mask."""
    with tf.name_scope(name or "byte_mask"):
        return tf.cast(_draw_keep_mask(shape, keep_prob, seed, seed2), tf.uint8)


def apply_packed_mask(x: Any, mask: Any, keep_prob: Any, name: str | None = None) -> tf.Tensor:
    """Masks a tensor: elements that a mask of `draw_packed_mask` keeps are divided by `keep_prob`, the others become 0.

    Args:
      x: float tensor.
      mask: result of `draw_packed_mask` for the shape of x.
      keep_prob: the probability with which the mask was made.
      name: scope of the ops.
    Returns:
      Tensor of the shape and dtype of x.
    """
    x = tf.convert_to_tensor(x)
    with tf.name_scope(name or "masked"):
        bits = tf.bitwise.bitwise_and(tf.bitwise.right_shift(mask[:, None], _bit_positions()), 1)
        return apply_byte_mask(x, tf.reshape(tf.reshape(bits, [-1])[: tf.size(x)], tf.shape(x)), keep_prob)


def apply_byte_mask(x: Any, mask: Any, keep_prob: Any, name: str | None = None) -> tf.Tensor:
    """Masks a tensor: elements kept by a mask of `draw_byte_mask` are divided by `keep_prob`, others become 0."""
    x = tf.convert_to_tensor(x)
    with tf.name_scope(name or "masked"):
        return x * tf.cast(mask, x.dtype) / tf.stop_gradient(tf.cast(keep_prob, x.dtype))


def _bit_positions():
    return tf.constant([*range(8)], tf.uint8)  # a list, because a graph cannot convert a range


def _draw_keep_mask(shape, keep_prob, seed, seed2):
    drawn = tf.raw_ops.RandomUniform(shape=tf.cast(shape, tf.int32), dtype=tf.float32, seed=seed, seed2=seed2)
    return drawn < tf.cast(keep_prob, tf.float32)


def stateless_seed(seed: Any, offset: Any) -> tf.Tensor:
    """Returns a seed for TensorFlow's stateless random operators: a vector of `seed` and `offset`."""
    return tf.stack([tf.cast(tf.reshape(part, []), tf.int64) for part in (seed, offset)])


def _check_float(x: Any, where: str) -> tf.Tensor:
    x = tf.convert_to_tensor(x)
    if not x.dtype.is_floating:
        raise ValueError(message(where, "x cannot be scaled", "a float tensor", x.dtype.name, "Cast x."))
    return x


def _check_probability(value: Any, name: str, where: str) -> None:
    """Raises ValueError if `value` is a number outside (0, 1]; does not check tensors."""
    if isinstance(value, numbers.Real):
        fix = "Give the probability to keep an element, not to drop it."
        check_number(where, name, +value, fix, above=0, at_most=1)  # + turns True into 1
