"""Averages gradients that are sent in 16 bits (float16 or bfloat16): sends only bits, and sums in float32.

Horovod sums 16-bit floats in 16 bits, which loses bits at every rank and is slow on processors: float16 took 2.7 times
as long as float32 in memory. And Horovod has no bfloat16. So a mean is computed in float32, with collectives that only
move bits. They send as many bytes as a ring all-reduce of 16-bit numbers, half as many as for float32. Nothing
overflows: a mean of numbers that fit into 16 bits fits, too. Summands are first multiplied by a power of two, because
the sum of two bfloat16 numbers can exceed float32.

With three or more ranks, every rank receives its own part of the tensors from all ranks, averages it, and sends the
mean to all ranks. With two ranks, the bit patterns are all-reduced as integers that wrap around; the sum minus a rank's
own pattern is the other rank's pattern. The reason is that Gloo's all-reduce uses both directions of a link at once,
while its other collectives between two ranks mostly do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from npu_bridge.collective.engines import transfer_tensors
from npu_bridge.collective.engines.communicator import Communicator
from npu_bridge.collective.fragments import lossless_prescale

FORMATS = ("none", "float16", "bfloat16")
_WIDTH_BYTES = 2


def wire_dtype(name: Any, owner: str) -> tf.DType | None:
    """Returns the dtype to which gradients are rounded before sending; None for "none" and for None.

    Raises:
      ValueError: the name is not one of `FORMATS`.
    """
    if name is not None and name not in FORMATS:
        raise ValueError(
            f"{owner}: unknown wire format. Expected {', '.join(map(repr, FORMATS))}; got wire={name!r}. Choose "
            f"float16 to keep 11 bits of every gradient, or bfloat16 to keep 8 bits and the range of float32."
        )
    return None if name in (None, "none") else tf.as_dtype(name)


def round_for_sending(values: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns values rounded to `dtype` for sending; values of 16 bits stay unchanged."""
    return values if values.dtype.size <= _WIDTH_BYTES else tf.cast(values, dtype)


def average_tensors(communicator: Communicator, tensors: Sequence[tf.Tensor], name: str, after: Sequence = ()) -> list:
    """Averages tensors of 16-bit floats over the ranks, in float32.

    Args:
      communicator: the ranks, at least two.
      tensors: dense tensors of float16 and bfloat16, of the same shapes on every rank.
      name: prefix of the collectives' names; the same on every rank and unique in its graph.
      after: values to compute before anything is sent.
    Returns:
      float32 tensors in the order and shapes of `tensors`, with the same bits on every rank.
    Ranks: collective.
    """
    mean_of_vector = _mean_of_two_ranks if communicator.size == 2 else _mean_of_many_ranks
    results = [None] * len(tensors)
    for dtype in sorted({tensor.dtype.name for tensor in tensors}):
        positions = [position for position, tensor in enumerate(tensors) if tensor.dtype.name == dtype]
        alike = [tensors[position] for position in positions]
        vector = tf.reshape(transfer_tensors.concatenate(alike), [-1])
        means = mean_of_vector(communicator, vector, f"{name}_{dtype}", after)
        for position, values in zip(positions, transfer_tensors.split_like(means, alike)):
            results[position] = values
    return results


def _mean_of_two_ranks(communicator, vector, name, after):
    own, size = _pad_vector(vector, 2)
    pairs = tf.bitcast(tf.reshape(own, [-1, 2]), tf.int32)
    (total,) = communicator.all_reduce([pairs], name, average=False, after=after)
    # Unsigned, because only unsigned integers are defined to wrap around.
    others = tf.bitcast(total, tf.uint32) - tf.bitcast(pairs, tf.uint32)
    other = tf.reshape(transfer_tensors.mark_exchange(pairs, tf.bitcast(others, vector.dtype)), [-1])
    return (tf.cast(own, tf.float32) / 2 + tf.cast(other, tf.float32) / 2)[:size]


def _mean_of_many_ranks(communicator, vector, name, after):
    padded, size = _pad_vector(vector, communicator.size)
    with tf.control_dependencies(after):
        padded = tf.identity(padded)
    part = tf.size(padded) // communicator.size
    received, _ = communicator.all_to_all(padded, tf.fill([communicator.size], part), f"{name}_parts")
    prescale = lossless_prescale(communicator.size)
    parts = tf.cast(tf.reshape(received, [communicator.size, part]), tf.float32) * prescale
    own_mean = tf.reduce_sum(parts, axis=0) / (communicator.size * prescale)
    means = communicator.all_gather(tf.cast(own_mean, vector.dtype), f"{name}_means")
    means = transfer_tensors.mark_exchange(padded, means)
    return tf.cast(means, tf.float32)[:size]


def _pad_vector(vector, multiple):
    """Returns the vector, padded with zeros until its length is a multiple of `multiple`, and its original length."""
    size = transfer_tensors.element_count(vector)
    return tf.pad(vector, [[0, -size % multiple]]), size
