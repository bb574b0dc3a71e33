"""Composes a communicator's operations: differentiable sums, all-to-all of arbitrary blocks, sends to one rank."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from npu_bridge.collective.communicator import Communicator
from npu_bridge.collective.transfer_tensors import moved_as_bits


def sum_over_ranks(communicator: Communicator, tensor: tf.Tensor, name: str) -> tf.Tensor:
    """Sums a dense tensor over the ranks; its gradient is the sum of the incoming gradients over the same ranks.

    The name of the all-reduce is the same on every rank; the gradient's has `_grad` appended.
    """

    @tf.custom_gradient
    def summed(value):
        def gradient(upstream):
            return sum_over_ranks(communicator, upstream, f"{name}_grad")

        return communicator.reduce(value, "sum", name), gradient

    return summed(tensor)


def without_gradient(result: Any, what: str) -> Any:
    """Returns the tensor, made by the call `what`, so that a backward pass raises instead of using a silent zero.

    Raises:
      LookupError: when it is differentiated.
    """
    if not (result.dtype.is_floating or result.dtype.is_complex):
        return result

    @tf.custom_gradient
    def passed_on(value):
        def gradient(upstream):
            raise LookupError(
                f"{what}: this collective has no gradient. Expected to differentiate an allreduce with 'sum'; got "
                f"{what}. Put tf.stop_gradient around its result, or write it with sums."
            )

        return tf.identity(value), gradient

    return passed_on(result)


def exchange_blocks(
    communicator: Communicator, flat: tf.Tensor, send: tuple[Any, Any], receive: tuple[Any, Any], name: str, owner: str
) -> tf.Tensor:
    """Sends one block to each rank and puts the blocks that arrive in their places, wherever the blocks lie.

    Args:
      communicator: the ranks, `size` of them.
      flat: vector of elements to send from; blocks can overlap.
      send: counts and displacements of the blocks to send, int64 vectors of length `size`, in elements.
      receive: the same for the blocks that arrive; elements that no block covers are 0.
      name: name of the collective, the same on every rank.
      owner: the caller, for the message.
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


def send_to(pair: Communicator, tensor: tf.Tensor, tag: int) -> tf.Operation:
    """Returns the op that sends a numeric tensor to the other rank of a pair; the receiver passes the same `tag`.

    It is a broadcast in the group of these two.
    """
    source = pair.rank
    sent = pair.broadcast(tensor, source, _name_of_pair(pair, source, tag))
    # Stateful, so that it also runs as a mere control dependency, and without output.
    return tf.raw_ops.Assert(condition=True, data=[sent])


def receive_from(pair: Communicator, shape: Any, dtype: tf.DType, tag: int) -> tf.Tensor:
    """Receives a tensor of known shape and dtype from the other rank of a pair; arguments as `send_to`."""
    source = 1 - pair.rank
    return pair.broadcast(tf.zeros(shape, dtype), source, _name_of_pair(pair, source, tag))


def _positions(counts, displacements, size):
    """Returns the element positions of `size` blocks, one block after the other."""
    starts, ends = tf.split(displacements, size), tf.split(displacements + counts, size)
    return tf.concat([tf.range(start[0], end[0]) for start, end in zip(starts, ends)], axis=0)


def _name_of_pair(pair, source, tag):
    # A second collective with the same tag gets the same number on both sides.
    sender, receiver = pair.members[source], pair.members[1 - source]
    return f"hccl_p2p_{sender}_to_{receiver}_tag_{tag}"
