"""All-to-all of blocks that lie anywhere in a flat array of elements."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from npu_bridge.collective.communicator import Communicator
from npu_bridge.collective.horovod_tensors import moved_as_bits


def exchange_blocks(
    communicator: Communicator, flat: tf.Tensor, send: tuple[Any, Any], receive: tuple[Any, Any], name: str, owner: str
) -> tf.Tensor:
    """Sends one block to each rank and puts the blocks that arrive where they belong.

    Args:
      communicator: the ranks, `size` of them.
      flat: vector of elements to send from; blocks may overlap.
      send: counts and displacements of the blocks to send, int64 vectors of length `size`, in elements.
      receive: the same for the blocks that arrive; elements that no block covers are 0.
      name: name of the transfer, the same on every rank.
      owner: who asks, for the message.
    Returns:
      Vector that reaches to the end of the farthest received block.
    Raises:
      tf.errors.InvalidArgumentError: when run, where another rank sent another number of elements than expected.
    """
    counts, _ = send
    receive_counts, receive_displacements = receive
    size = communicator.size
    where = f"{owner} on rank {communicator.rank} of {size}"

    def exchange(elements):
        arrived, arrived_counts = communicator.all_to_all(
            tf.gather(elements, _positions(*send, size)), tf.cast(counts, tf.int32), name
        )
        check = tf.debugging.assert_equal(
            tf.cast(arrived_counts, tf.int64),
            receive_counts,
            message=f"{where}: other numbers of elements arrived (first line) than recv_counts expects (second).",
        )
        with tf.control_dependencies([check] if check is not None else []):
            length = tf.reduce_max(receive_counts + receive_displacements)
            empty = tf.zeros(length[tf.newaxis], arrived.dtype)
        return tf.tensor_scatter_nd_update(empty, _positions(*receive, size)[:, tf.newaxis], arrived)

    return moved_as_bits(flat, exchange)


def _positions(counts, displacements, size):
    """The element positions of `size` blocks, one block after the other."""
    starts, ends = tf.split(displacements, size), tf.split(displacements + counts, size)
    return tf.concat([tf.range(start[0], end[0]) for start, end in zip(starts, ends)], axis=0)
