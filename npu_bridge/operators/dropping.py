"""Dropout whose second argument is the probability to keep an element."""

from __future__ import annotations

import numbers
from typing import Any

import tensorflow as tf

from npu_bridge.options.errors import message


def dropout(x: Any, keep_prob: Any, noise_shape: Any, seed: int | None, name: str | None, where: str) -> tf.Tensor:
    """Keeps elements with a probability, multiplied by its inverse; the others become 0.

    Raises:
      ValueError: x is not a float tensor, or `keep_prob` is a number outside (0, 1].
    """
    x = _floating(x, where)
    _check_probability(keep_prob, "keep_prob", where)
    if isinstance(keep_prob, float) and keep_prob == 1.0:
        return x
    return tf.nn.dropout(x, _rate(keep_prob, x.dtype), noise_shape=noise_shape, seed=seed, name=name)


def keep_mask(
    x: Any, keep_prob: Any, noise_shape: Any, seed: int | None, dtype: Any, name: str | None, where: str
) -> tf.Tensor:
    """True, or 1, where `dropout` would keep an element. Arguments and errors are those of `dropout`."""
    x = _floating(x, where)
    _check_probability(keep_prob, "keep_prob", where)
    with tf.name_scope(name or "keep_mask"):
        shape = tf.shape(x) if noise_shape is None else noise_shape
        return tf.cast(tf.random.uniform(shape, seed=seed) < tf.cast(keep_prob, tf.float32), dtype)


def stateless_dropout(x: Any, noise_shape: Any, drop_prob: Any, seed: Any, offset: Any, where: str) -> tf.Tensor:
    """Drops elements with a probability; the same seed and offset always drop the same.

    Raises:
      ValueError: x is not a float tensor, or `drop_prob` is a number outside [0, 1).
    """
    x = _floating(x, where)
    if isinstance(drop_prob, numbers.Real):
        _check_probability(1 - drop_prob, "1 - p", where)
    rate = tf.stop_gradient(tf.cast(drop_prob, x.dtype))
    return tf.nn.experimental.stateless_dropout(x, rate, stateless_seed(seed, offset), noise_shape=noise_shape)


def stateless_seed(seed: Any, offset: Any) -> tf.Tensor:
    """Two integers as the seed of TensorFlow's stateless random operators."""
    return tf.stack([tf.cast(tf.reshape(part, []), tf.int64) for part in (seed, offset)])


def _rate(keep_prob: Any, dtype: tf.DType) -> Any:
    if isinstance(keep_prob, numbers.Real):
        return 1 - keep_prob
    return 1 - tf.stop_gradient(tf.cast(keep_prob, dtype))


def _floating(x: Any, where: str) -> tf.Tensor:
    x = tf.convert_to_tensor(x)
    if not x.dtype.is_floating:
        raise ValueError(message(where, "x cannot be scaled", "a float tensor", x.dtype.name, "Cast it."))
    return x


def _check_probability(value: Any, name: str, where: str) -> None:
    """ValueError for a number outside (0, 1]; a tensor is not looked at."""
    if isinstance(value, numbers.Real) and not 0 < value <= 1:
        mend = "It is the probability to keep an element, not to drop it."
        raise ValueError(message(where, f"{name} is no probability", "a number in (0, 1]", repr(value), mend))
