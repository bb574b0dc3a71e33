"""What gradients travel as: themselves, or 16-bit numbers that are added up in float32.

Horovod sums 16-bit floats in 16 bits, which loses bits at every rank and is slow on processors (float16 took 2.7 times
as long as float32 here), and it has no bfloat16. So a sum is made of two transfers that only move bits: every rank gets
its own part of the tensors from all ranks, adds it up in float32, and sends the mean to all. That is the number of
bytes a ring all-reduce of 16-bit numbers moves, half that of float32; every gradient is rounded twice, however many
ranks there are; and a mean of numbers that exist in 16 bits exists in 16 bits, so nothing overflows on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from npu_bridge.collective.communicator import Communicator

FORMATS = ("none", "float16", "bfloat16")
_WIDTH_BYTES = 2


def wire_dtype(name: Any, owner: str) -> tf.DType | None:
    """The dtype gradients are rounded to before they travel; None for "none".

    Args:
      name: one of `FORMATS`; None means "none".
      owner: who was given the name, for the message.
    Raises:
      ValueError: it is no wire format.
    """
    if name is not None and name not in FORMATS:
        raise ValueError(
            f"{owner}: unknown wire format. Expected {', '.join(map(repr, FORMATS))}; got wire={name!r}. float16 keeps "
            f"11 bits of every gradient, bfloat16 keeps 8 and the range of float32."
        )
    return None if name in (None, "none") else tf.as_dtype(name)


def rounded(values: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """The values as they travel: in `dtype`, or unchanged when they have 16 bits already."""
    return values if values.dtype.size <= _WIDTH_BYTES else tf.cast(values, dtype)


def mean(communicator: Communicator, tensors: Sequence[tf.Tensor], name: str) -> list:
    """The mean over the ranks of tensors of 16-bit floats, added up in float32.

    Args:
      communicator: the ranks.
      tensors: dense tensors of float16 and bfloat16, of the same shapes on every rank.
      name: prefix of the transfers' names; the same on every rank and unique in its graph.
    Returns:
      Tensors in the order, shapes and dtypes of `tensors`, with the same bits on every rank.
    Ranks: collective.
    """
    results = [None] * len(tensors)
    for dtype in sorted({tensor.dtype.name for tensor in tensors}):
        positions = [position for position, tensor in enumerate(tensors) if tensor.dtype.name == dtype]
        means = _mean_of_one_dtype(communicator, [tensors[position] for position in positions], f"{name}_{dtype}")
        for position, tensor in zip(positions, means):
            results[position] = tensor
    return results


def _mean_of_one_dtype(communicator, tensors, name):
    sizes = [_element_count(tensor) for tensor in tensors]
    total, dtype = sum(sizes), tensors[0].dtype
    part = (total + communicator.size - 1) // communicator.size
    joined = tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0)
    joined = tf.pad(joined, [[0, part * communicator.size - total]])
    counts = tf.fill([communicator.size], part)
    own_parts, _ = communicator.all_to_all(joined, counts, f"{name}_parts")
    sums = tf.reduce_sum(tf.cast(tf.reshape(own_parts, [communicator.size, part]), tf.float32), axis=0)
    means = communicator.all_gather(tf.cast(sums / communicator.size, dtype), f"{name}_means")
    split = tf.split(means[:total], sizes)
    return [tf.reshape(values, _shape(tensor)) for values, tensor in zip(split, tensors)]


def _shape(tensor):
    return tensor.shape if tensor.shape.is_fully_defined() else tf.shape(tensor)


def _element_count(tensor):
    """A Python number where the static shape tells it, so that the graph stays small; else a tensor."""
    count = tensor.shape.num_elements()
    return tf.size(tensor) if count is None else count
