"""Builds further operations from those of a communicator: differentiable sums, exchanges of blocks, and sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from npu_bridge.base.tf_internals.graphs import is_branch_or_body, run_in_any_order
from npu_bridge.collective.engines.communicator import Communicator
from npu_bridge.collective.engines.transfer_tensors import move_as_bits, prevent_pruning


def keep_in_function(communicator: Communicator, result: tf.Tensor) -> tf.Tensor:
    """Returns the result of a collective; a function being built runs the collective even if nothing uses the result.

    Otherwise, TensorFlow would remove the collective on a rank that alone does not use the result, and the other ranks
    would wait forever. `prevent_op_merging` does the same in branches and bodies of loops.
    """
    if communicator.size > 1 and tf.inside_function() and not is_branch_or_body(result.graph):
        run_in_any_order(prevent_pruning(result))
    return result


def sum_over_ranks(communicator: Communicator, tensor: tf.Tensor, name: str) -> tf.Tensor:
    """Sums a dense tensor over the ranks; the gradient of the sum is summed over the same ranks.

    `name` is the name of the all-reduce, equal on all ranks. The all-reduce of the gradient is named `<name>_grad`.
    """

    @tf.custom_gradient
    def sum_with_gradient(value):
        def gradient(upstream):
            return sum_over_ranks(communicator, upstream, f"{name}_grad")

        return keep_in_function(communicator, communicator.reduce(value, "sum", name)), gradient

    return sum_with_gradient(tensor)


def sum_together(communicator: Communicator, tensors: Sequence[tf.Tensor], name: str) -> list:
    """Sums a list of dense tensors over the ranks in one all-reduce; names and gradient are as for `sum_over_ranks`."""
    places = [place for place, tensor in enumerate(tensors) if tensor.dtype.is_floating]  # integers have no gradient

    @tf.custom_gradient
    def sum_with_gradient(*values):
        def gradient(*upstream):
            given = [tf.convert_to_tensor(upstream[place]) for place in places]
            gradients = dict(zip(places, sum_together(communicator, given, f"{name}_grad")))
            return [gradients.get(place) for place in range(len(values))]

        sums = communicator.all_reduce(values, name, average=False)
        for total in {total.dtype: total for total in sums}.values():  # there is one all-reduce for each dtype
            keep_in_function(communicator, total)
        return sums, gradient

    return sum_with_gradient(*tensors)


def forbid_gradient(result: Any, collective_name: str) -> Any:
    """Returns a tensor unchanged, but makes a backward pass through the tensor raise an error instead of using zero.

    `collective_name` is the collective that made the tensor, for the message.

    Raises:
      LookupError: when the tensor is differentiated.
    """
    if not (result.dtype.is_floating or result.dtype.is_complex):
        return result

    @tf.custom_gradient
    def identity_without_gradient(value):
        def gradient(upstream):
            raise LookupError(
                f"{collective_name}: this collective has no gradient. Expected an allreduce with 'sum'; got "
                f"{collective_name}. Put "
                f"tf.stop_gradient around the result, or use sums instead."
            )

        return tf.identity(value), gradient

    return identity_without_gradient(result)


def exchange_blocks(
    communicator: Communicator,
    flat: tf.Tensor,
    send_layout: tuple[Any, Any],
    receive_layout: tuple[Any, Any],
    name: str,
    owner: str,
) -> tf.Tensor:
    """Sends a block of a vector to each rank, and puts the received blocks at given positions of a new vector.

    Args:
      communicator: the ranks, `size` of them.
      flat: vector with the blocks to send, which can overlap.
      send_layout: counts and displacements of the blocks to send, int64 vectors of length `size`, in elements.
      receive_layout: counts and displacements of the blocks to receive; elements outside of all blocks are 0.
      name: name of the collective, the same on every rank.
      owner: the caller, for the message.
    Returns:
      Vector that ends where the last received block ends.
    Raises:
      tf.errors.InvalidArgumentError: at run time, if another rank sends another number of elements than expected.
    """
    counts, _ = send_layout
    receive_counts, receive_displacements = receive_layout
    size = communicator.size
    where = f"{owner} on rank {communicator.rank} of {size}"

    def exchange(elements):
        arrived, arrived_counts = communicator.all_to_all(
            tf.gather(elements, _element_positions(*send_layout, size)), tf.cast(counts, tf.int32), name
        )
        check = tf.debugging.assert_equal(
            tf.cast(arrived_counts, tf.int64),
            receive_counts,
            message=f"{where}: the numbers of received elements (first line) differ from recv_counts (second line).",
        )
        with tf.control_dependencies([check] if check is not None else []):
            length = tf.reduce_max(receive_counts + receive_displacements)
            empty = tf.zeros(length[tf.newaxis], arrived.dtype)
        return tf.tensor_scatter_nd_update(empty, _element_positions(*receive_layout, size)[:, tf.newaxis], arrived)

    return move_as_bits(flat, exchange)


def send_to(rank_pair: Communicator, tensor: tf.Tensor, tag: int) -> tf.Operation:
    """Returns the op that sends a numeric tensor to the other rank of a pair; the receiver passes the same `tag`.

    Broadcasts the tensor in the group of both ranks.
    """
    source = rank_pair.rank
    sent = rank_pair.broadcast(tensor, source, _name_of_pair(rank_pair, source, tag))
    # A stateful op without output, so that it also runs if it is only a control dependency.
    return tf.raw_ops.Assert(condition=True, data=[sent])


def receive_from(rank_pair: Communicator, shape: Any, dtype: tf.DType, tag: int) -> tf.Tensor:
    """Receives a tensor of known shape and dtype from the other rank of a pair, which passes the same `tag`."""
    source = 1 - rank_pair.rank
    return rank_pair.broadcast(tf.zeros(shape, dtype), source, _name_of_pair(rank_pair, source, tag))


def _element_positions(counts, displacements, size):
    """Returns the element positions of `size` blocks, one block after the other."""
    starts, ends = tf.split(displacements, size), tf.split(displacements + counts, size)
    return tf.concat([tf.range(start[0], end[0]) for start, end in zip(starts, ends)], axis=0)


def _name_of_pair(rank_pair, source, tag):
    # A second collective with the same tag gets the same number on both sides.
    sender, receiver = rank_pair.members[source], rank_pair.members[1 - source]
    return f"hccl_p2p_{sender}_to_{receiver}_tag_{tag}"
