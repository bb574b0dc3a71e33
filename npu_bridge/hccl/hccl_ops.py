"""Provides the collectives of the documented interface, as TensorFlow ops between the ranks of a group.

Every function is collective: all ranks of `group` must call it, in graphs built alike, and run its result. Functions
work in a TF 1 graph, in a `tf.function` and eagerly; with one rank they copy nothing. Ranks given as `root_rank`,
`dest_rank` and `src_rank` are counted in the group. Sizes and displacements count elements.

`fusion` and `fusion_id` are checked and otherwise left to Horovod, which joins transfers that are ready together; no
result depends on them. Only `allreduce` with "sum" has a gradient (the sum of the incoming gradients over the same
group); differentiating any other function raises LookupError.

In a `tf.function`, a collective runs even if this rank does not use its result.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from npu_bridge.base.arguments import is_integer
from npu_bridge.base.tf_internals import keras3
from npu_bridge.collective.checks.plan_of_transfers import announce_collective
from npu_bridge.collective.composed import exchange_blocks, receive_from, send_to, sum_over_ranks
from npu_bridge.collective.groups import WORLD
from npu_bridge.hccl.checks import (
    BROADCASTABLE,
    MOVABLE,
    REDUCIBLE,
    CollectiveCall,
    device_address_error,
    first_dimension,
    shape_with_rows,
)

__all__ = [
    "all_to_all_v",
    "all_to_all_v_c",
    "allgather",
    "allreduce",
    "alltoallv",
    "alltoallvc",
    "broadcast",
    "gather_all_to_all_v",
    "receive",
    "reduce",
    "reduce_scatter",
    "remote_read",
    "remote_ref_read",
    "remote_scatter_write",
    "remote_write",
    "send",
]


def allreduce(tensor, reduction, fusion=1, fusion_id=-1, group=WORLD):
    """Combines a tensor over the ranks, element by element.

    Args:
      tensor: int8, int16, int32, int64, float16, bfloat16, float32 or float64, of the same shape on all ranks. A list
        of tensors is packed into one.
      reduction: "sum", "max", "min" or "prod".
      fusion: 0, 1 or 2.
      fusion_id: -1; with `fusion=2` an id from 0 to 2**31 - 1.
      group: name of the group.
    Returns:
      Tensor of the same shape and dtype, equal on all ranks.
    Raises:
      TypeError: the tensor is sparse or of another dtype.
      ValueError: an argument is not one of the above.
    Ranks: collective in `group`.
    """
    call = CollectiveCall("hccl_ops.allreduce", group)
    call.check_reduction(reduction)
    call.check_fusion(fusion, fusion_id, allowed=(0, 1, 2))
    value = call.dense_tensor(tensor, REDUCIBLE)
    name = announce_collective(call.communicator, f"allreduce with {reduction!r}", value)
    if reduction == "sum":
        return sum_over_ranks(call.communicator, value, name)
    reduced = call.communicator.reduce(value, reduction, name)
    return call.finish(reduced, f" with {reduction!r}")


def reduce(tensor, reduction, root_rank, fusion=0, fusion_id=-1, group=WORLD):
    """Combines a tensor over the ranks for the rank `root_rank`. In this implementation, every rank gets the result.

    Args:
      root_rank: the rank that needs the result.
      tensor, reduction, fusion, fusion_id, group: as in `allreduce`, with `fusion` 0 or 2.
    Returns, Raises, Ranks: as `allreduce`.
    """
    call = CollectiveCall("hccl_ops.reduce", group)
    call.check_reduction(reduction)
    call.check_fusion(fusion, fusion_id)
    call.check_group_rank(root_rank, "root_rank")
    value = call.dense_tensor(tensor, REDUCIBLE)
    name = announce_collective(call.communicator, f"reduce to {root_rank} with {reduction!r}", value)
    return call.finish(call.communicator.reduce(value, reduction, name))


def allgather(tensor, rank_size, group=WORLD, fusion=0, fusion_id=-1):
    """Joins the tensors of all ranks along the first dimension, in rank order.

    Args:
      tensor: of rank 1 or more and the same shape on all ranks, with a dtype that `allreduce` accepts, or an unsigned
        integer dtype.
      rank_size: number of ranks in the group.
      group, fusion, fusion_id: as in `reduce`.
    Returns:
      Tensor of the same dtype, `rank_size` times as long in the first dimension.
    Raises, Ranks: as `allreduce`.
    """
    call = CollectiveCall("hccl_ops.allgather", group)
    call.check_rank_size(rank_size)
    call.check_fusion(fusion, fusion_id)
    value = call.dense_tensor(tensor, MOVABLE)
    call.check_has_rows(value)
    gathered = call.communicator.all_gather(value, announce_collective(call.communicator, "allgather", value))
    rows = first_dimension(value)
    return call.finish(tf.ensure_shape(gathered, shape_with_rows(value, rows and rows * rank_size)))


def broadcast(tensor, root_rank, fusion=2, fusion_id=0, group=WORLD):
    """Sends one rank's tensors to every rank; variables get that rank's values.

    Args:
      tensor: list of tensors and variables, including variables of Keras 3, of any numeric or boolean dtype. Running
        the result for a variable also assigns the variable, so all ranks then have the same values.
      root_rank: the rank whose values are sent.
      fusion, fusion_id, group: as in `reduce`.
    Returns:
      List of tensors, as long as `tensor`.
    Raises:
      TypeError: `tensor` is not a list, or holds another dtype.
      ValueError: as `allreduce`.
    Ranks: collective in `group`.
    """
    call = CollectiveCall("hccl_ops.broadcast", group)
    call.check_fusion(fusion, fusion_id, id_without_fusion=0)
    call.check_group_rank(root_rank, "root_rank")
    if not isinstance(tensor, (list, tuple)):
        expected, got = "a list of tensors and variables", type(tensor).__name__
        raise call.error("tensor is not a list", expected, got, "Write [x].", TypeError)
    return [_broadcast_item(call, item, root_rank) for item in tensor]


def reduce_scatter(tensor, reduction, rank_size, group=WORLD, fusion=0, fusion_id=-1):
    """Combines a tensor over the ranks; each rank gets its own part of the first dimension.

    Args:
      tensor: of rank 1 or more, its first dimension divisible by `rank_size`; dtypes as in `allreduce`.
      reduction, rank_size, group, fusion, fusion_id: as in `reduce` and `allgather`.
    Returns:
      Tensor of the same dtype, the first dimension divided by `rank_size`.
    Raises, Ranks: as `allreduce`.
    """
    call = CollectiveCall("hccl_ops.reduce_scatter", group)
    call.check_reduction(reduction)
    call.check_rank_size(rank_size)
    call.check_fusion(fusion, fusion_id)
    value = call.dense_tensor(tensor, REDUCIBLE)
    value = call.check_divisible(value)
    rows = first_dimension(value)
    name = announce_collective(call.communicator, f"reduce_scatter with {reduction!r}", value)
    part = call.communicator.reduce_scatter(value, reduction, name)
    return call.finish(tf.ensure_shape(part, shape_with_rows(value, rows and rows // rank_size)))


def send(tensor, sr_tag, dest_rank, group=WORLD):
    """Sends a tensor to one rank, which calls `receive`.

    `send` is a broadcast between sender and receiver, so a group of just these two ranks must exist: `group` itself (in
    a job of two ranks, say), or another group made by `create_group`. `send` works in graphs only, and finishes when
    the receiver has the tensor: if two ranks send to each other, `receive` must not wait for `send`.

    Args:
      tensor: dtypes as in `allgather`.
      sr_tag: integer that pairs the call with its `receive`.
      dest_rank: the receiving rank.
      group: name of the group in which `dest_rank` is counted.
    Returns:
      The op to run; it has no output.
    Raises:
      NotImplementedError: there is no group of just the two ranks.
      RuntimeError: executed eagerly.
      TypeError, ValueError: as `allreduce`.
    Ranks: this rank and `dest_rank`.
    """
    call = CollectiveCall("hccl_ops.send", group)
    return send_to(call.find_pair(dest_rank, "dest_rank", sr_tag), call.dense_tensor(tensor, MOVABLE), sr_tag)


def receive(shape, data_type, sr_tag, src_rank, group=WORLD):
    """Receives a tensor from a rank that calls `send`.

    Args:
      shape: list of integers.
      data_type: dtype of the tensor that is sent.
      sr_tag, group: as given to `send`.
      src_rank: the sending rank.
    Returns:
      The tensor.
    Raises, Ranks: as `send`.
    """
    call = CollectiveCall("hccl_ops.receive", group)
    dtype = tf.as_dtype(data_type)
    if dtype not in MOVABLE:
        expected = ", ".join(d.name for d in MOVABLE)
        raise call.error("data_type cannot be sent", expected, dtype.name, "Cast the tensor.", TypeError)
    if not tf.TensorShape(shape).is_fully_defined():
        raise call.error("shape is not fully known", "a list of integers", shape, "Give every dimension.")
    pair = call.find_pair(src_rank, "src_rank", sr_tag)
    return call.finish(receive_from(pair, shape, dtype, sr_tag))


def all_to_all_v(send_data, send_counts, send_displacements, recv_counts, recv_displacements, group=WORLD):
    """Sends one block of elements to each rank; blocks can start anywhere in the sent and the received data.

    Args:
      send_data: of any shape, addressed as a flat array of elements; dtypes as in `allgather`.
      send_counts: int64, number of elements for each rank.
      send_displacements: int64, where the block for each rank starts; blocks may overlap.
      recv_counts: int64, number of elements from each rank.
      recv_displacements: int64, where the block from each rank goes.
      group: name of the group.
    Returns:
      Vector that ends with the last received block; elements outside of all received blocks are 0.
    Raises:
      TypeError, ValueError: as `allreduce`, or a block is known to reach beyond `send_data`.
      tf.errors.InvalidArgumentError: when run, if a rank sent another number of elements than expected.
    Ranks: collective in `group`.
    """
    call = CollectiveCall("hccl_ops.all_to_all_v", group)
    flat = tf.reshape(call.dense_tensor(send_data, MOVABLE, "send_data"), [-1])
    counts = call.entries_per_rank(send_counts, "send_counts")
    displacements = call.entries_per_rank(send_displacements, "send_displacements")
    call.check_blocks_fit(flat, counts, displacements)
    expected = (
        call.entries_per_rank(recv_counts, "recv_counts"),
        call.entries_per_rank(recv_displacements, "recv_displacements"),
    )
    name = announce_collective(call.communicator, "all_to_all_v", flat, may_differ=True)
    received = exchange_blocks(call.communicator, flat, (counts, displacements), expected, name, call.op)
    return call.finish(received)


def all_to_all_v_c(send_data, send_count_matrix, rank, fusion=0, fusion_id=-1, group=WORLD):
    """Sends one block of elements to each rank; blocks follow each other without gaps.

    Args:
      send_data: as in `all_to_all_v`; holds the blocks for rank 0, 1, ... one after the other.
      send_count_matrix: int64 of shape (ranks, ranks), equal on all ranks; row = sender, column = receiver.
        Alternatively, a vector of all its rows, as from an `allgather` of each rank's counts.
      rank: this process's rank in the group.
      fusion, fusion_id, group: as in `reduce`.
    Returns:
      Vector of the received blocks, in rank order.
    Raises, Ranks: as `all_to_all_v`.
    """
    call = CollectiveCall("hccl_ops.all_to_all_v_c", group)
    call.check_fusion(fusion, fusion_id)
    communicator = call.communicator
    if not is_integer(rank) or rank != communicator.rank:
        expected, fix = f"rank={communicator.rank}", "Pass get_rank_id(group)."
        raise call.error("rank is not the rank of this process", expected, repr(rank), fix)
    flat = tf.reshape(call.dense_tensor(send_data, MOVABLE, "send_data"), [-1])
    matrix = tf.cast(tf.convert_to_tensor(send_count_matrix), tf.int64)
    if matrix.shape.rank == 1 and matrix.shape.is_compatible_with([communicator.size**2]):
        matrix = tf.reshape(matrix, [communicator.size] * 2)
    if not matrix.shape.is_compatible_with([communicator.size] * 2):
        problem = "send_count_matrix does not have a row and a column per rank"
        fix = "Write into row r, column c how many elements rank r sends to rank c."
        raise call.error(problem, f"shape {(communicator.size,) * 2}", f"shape {matrix.shape}", fix)
    sent = call.entries_per_rank(matrix[rank], "a row of send_count_matrix")
    received_counts = call.entries_per_rank(matrix[:, rank], "a column of send_count_matrix")
    blocks, places = (
        (sent, _consecutive_displacements(sent)),
        (received_counts, _consecutive_displacements(received_counts)),
    )
    call.check_blocks_fit(flat, *blocks)
    name = announce_collective(communicator, "all_to_all_v_c", flat, may_differ=True)
    received = exchange_blocks(communicator, flat, blocks, places, name, call.op)
    return call.finish(received)


alltoallv = all_to_all_v
alltoallvc = all_to_all_v_c


def gather_all_to_all_v(
    addrinfo, addrinfo_count_per_rank, recv_counts, recv_displacements, dtype, addr_length, group=WORLD
):
    """Raises NotImplementedError: the op reads raw device addresses. Gather the elements and call `all_to_all_v`."""
    raise device_address_error("gather_all_to_all_v", "Gather the elements with tf.gather and call all_to_all_v.")


def remote_read(tensorRemote, data_type):  # noqa: N803 - the documented name
    """Raises NotImplementedError: the op reads another server's device memory. Call `allgather` or `all_to_all_v`."""
    raise device_address_error("remote_read", "Call allgather or all_to_all_v on all ranks.")


def remote_ref_read(tensorRemote, cache, offset):  # noqa: N803 - the documented name
    """Raises NotImplementedError: the op reads another server's device memory. Call `allgather` or `all_to_all_v`."""
    raise device_address_error("remote_ref_read", "Call allgather or all_to_all_v on all ranks.")


def remote_write(tensorRemote, tensorLocal, data_type):  # noqa: N803 - the documented name
    """Raises NotImplementedError: the op writes another server's device memory. Call `broadcast` or `all_to_all_v`."""
    raise device_address_error("remote_write", "Call broadcast or all_to_all_v on all ranks.")


def remote_scatter_write(tensorRemote, tensorLocal, offset):  # noqa: N803 - the documented name
    """Raises NotImplementedError: the op writes another server's device memory. Call `all_to_all_v`."""
    raise device_address_error(
        "remote_scatter_write", "Call all_to_all_v on all ranks, then tf.tensor_scatter_nd_update."
    )


def _broadcast_item(call, item, root_rank):
    item = keras3.tensorflow_variable_of(item)
    value = call.dense_tensor(item, BROADCASTABLE)
    sent = call.communicator.broadcast(
        value, root_rank, announce_collective(call.communicator, f"broadcast from {root_rank}", value)
    )
    if isinstance(item, tf.Variable):
        assigned = item.assign(sent, read_value=False)
        with tf.control_dependencies([] if assigned is None else [assigned]):
            sent = tf.identity(sent)
    return call.finish(sent)


def _consecutive_displacements(counts):
    known = tf.get_static_value(counts)
    if known is not None:
        return tf.constant(np.cumsum(known) - known, tf.int64)
    return tf.cumsum(counts, exclusive=True)
