"""Prepares tensors for the operators of both engines: casts dtypes, concatenates, and keeps operators in the graph.

Both engines lack some dtypes. An all-gather, a broadcast or an all-to-all only copies elements, so it can send them as
any dtype of the same width. An all-reduce sums elements, so it needs a dtype that can represent the sum. Casts
around a collective hide which tensor is sent. So a marker operator names the tensor (`mark_exchange`), and graph passes
need not recognise the casts. The dtype tables here are for Horovod 0.28.

TensorFlow 2.15 treats Horovod's operators as pure functions: when it optimises the graph, it evaluates an operator with
constant inputs (constant folding), and merges two operators with the same inputs. If this happens on one rank only, the
other ranks wait forever. `prevent_folding` and `prevent_op_merging` keep every operator in the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Callable

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from npu_bridge.base.tf_internals.graphs import disable_parallel_iterations, is_branch_or_body, set_attribute

# Sums of 16-bit integers and their products are the same in int32, once cast back.
_WIDER = {tf.bfloat16: tf.float32, tf.int16: tf.int32, tf.uint16: tf.int32}
_SCATTER_WIDER = {**_WIDER, tf.int8: tf.int32, tf.uint8: tf.int32}
_SAME_BITS = {
    tf.bfloat16: tf.int16,
    tf.uint32: tf.int32,
    tf.uint64: tf.int64,
    tf.complex64: tf.int64,
    tf.complex128: tf.int64,
}

# At least 64 bytes for elements of 16 bits or more; TensorFlow calls such parts aligned.
_ALIGNED_ELEMENTS = 32
_SENT_BY = "_npu_bridge_sent_by"
_ENDS = ("Bitcast", "HorovodAllgather")  # types of ops that can have a mark; searching all ops is slow


def all_reduce_dtype(dtype: tf.DType) -> tf.DType:
    """Returns the dtype in which tensors of `dtype` are all-reduced."""
    return _WIDER.get(dtype, dtype)


def reduce_scatter_dtype(dtype: tf.DType) -> tf.DType:
    """Returns the dtype for the reduce-scatter of tensors of `dtype`."""
    return _SCATTER_WIDER.get(dtype, dtype)


def move_as_bits(
    tensor: tf.Tensor,
    move: Callable[[tf.Tensor], Any],
    is_marked: bool = False,
    carrier_dtypes: Mapping[tf.DType, tf.DType] = _SAME_BITS,
) -> tf.Tensor:
    """Applies `move` to the bits of a tensor, in a dtype that the engine can send.

    Args:
      tensor: tensor of any dtype.
      move: a function that only copies elements.
      is_marked: whether to mark a changed floating dtype in the graph; see `mark_exchange`.
      carrier_dtypes: for each dtype that the engine lacks, the dtype in which to send it; by default, as Horovod needs.
    """
    carrier = carrier_dtypes.get(tensor.dtype)
    if carrier is None:
        return move(tensor)
    bits = tf.bitcast(tensor, carrier)
    result = tf.bitcast(move(bits), tensor.dtype)
    return mark_exchange(bits, result) if is_marked and tensor.dtype.is_floating else result


def mark_exchange(exchange_start: tf.Tensor, received: tf.Tensor) -> tf.Tensor:
    """Marks in a graph that floating-point numbers are exchanged between ranks; returns `received`.

    The mark says that no arriving number is larger than the largest number that any rank has sent.

    Args:
      exchange_start: the output of the op that begins the exchange; the first input of this op has the sent numbers.
      received: the arriving numbers, in the original dtype. A later mark of this tensor replaces this mark.
    """
    if not tf.executing_eagerly():
        set_attribute(received.op, _SENT_BY, attr_value_pb2.AttrValue(s=exchange_start.op.name.encode()))
    return received


def start_of_exchange(op: tf.Operation) -> tf.Operation | None:
    """Returns the op that begins the exchange that `op` ends; None if `op` is not marked as the end of an exchange."""
    if op.type not in _ENDS or _SENT_BY not in op.node_def.attr:
        return None
    try:
        return op.graph.get_operation_by_name(op.get_attr(_SENT_BY).decode())
    except KeyError:  # a copy in another graph, with other names
        return None


def broadcast_strings(
    root_rank: int, tensor: tf.Tensor, all_gather: Callable[[tf.Tensor, str], tf.Tensor]
) -> tf.Tensor:
    """Broadcasts a tensor of strings, by gathering their bytes, because Horovod has no strings.

    Args:
      root_rank: the rank whose strings all ranks get.
      tensor: strings, in the same shape on all ranks.
      all_gather: a function of a vector and a name that joins the ranks' vectors, which can differ in length.
    """
    letters = tf.io.decode_raw(tf.io.serialize_tensor(tensor), tf.uint8)
    lengths = all_gather(tf.shape(letters), "lengths")
    start = tf.reduce_sum(lengths[:root_rank])
    own = all_gather(letters, "letters")[start : start + lengths[root_rank]]
    characters = tf.constant([bytes([number]) for number in range(256)])
    text = tf.strings.reduce_join(tf.gather(characters, tf.cast(own, tf.int32)))
    return tf.ensure_shape(tf.io.parse_tensor(text, tf.string), tensor.shape)


def concatenate(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Concatenates tensors of one dtype to a vector; returns a single tensor unchanged.

    This is faster than an all-reduce of several tensors: Horovod's single thread would copy them into a buffer and back
    while the network is idle. TensorFlow's threads concatenate while other tensors are being sent.
    """
    if len(tensors) == 1:
        return tensors[0]
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0)


def split_like(vector: tf.Tensor, tensors: Sequence[tf.Tensor]) -> list:
    """Splits a vector of the length of `concatenate(tensors)` into tensors with the shapes of `tensors`."""
    return [_reshape_like(part, tensor) for part, tensor in zip(_split_parts(vector, tensors), tensors)]


def _split_parts(vector, tensors):
    if len(tensors) == 1:
        return [vector]
    counts = [element_count(tensor) for tensor in tensors]
    if all(isinstance(count, int) and count % _ALIGNED_ELEMENTS == 0 for count in counts):
        # Aligned parts share the memory of the whole; other parts are copied.
        rows = tf.reshape(vector, [-1, _ALIGNED_ELEMENTS])
        return tf.split(rows, [count // _ALIGNED_ELEMENTS for count in counts])
    return tf.split(vector, counts, num=len(counts))


def _reshape_like(part, tensor):
    if tensor.shape.is_fully_defined():
        return part if part.shape == tensor.shape else tf.reshape(part, tensor.shape)
    return tf.reshape(part, tf.shape(tensor))


def element_count(tensor: tf.Tensor) -> Any:
    """Returns the number of elements: an int if the static shape is known, to keep the graph small; else a tensor."""
    count = tensor.shape.num_elements()
    return tf.size(tensor) if count is None else count


def prevent_folding(tensors: Sequence[tf.Tensor]) -> list:
    """Returns a collective's inputs with a stateful copy of the smallest one, which prevents constant folding.

    The operator that copies is stateful, and has kernels on every device.
    """
    tensors = list(tensors)
    if not tf.executing_eagerly():
        smallest = min(range(len(tensors)), key=lambda position: tensors[position].shape.num_elements() or 0)
        tensors[smallest] = tf.raw_ops.DeepCopy(x=tensors[smallest])
    return tensors


def prevent_op_merging(result: tf.Tensor) -> tf.Tensor:
    """Gives the operator of `result` a unique attribute, so that TensorFlow does not merge it with another operator.

    In a loop, also prevents an iteration from starting the operator before the previous iteration has finished it.
    """
    if not tf.executing_eagerly():
        disable_parallel_iterations(result.op)
        if is_branch_or_body(result.graph):
            kept = prevent_pruning(result)  # the next iteration waits for all stateful operators
            if not tf.compat.v1.executing_eagerly_outside_functions():
                result.graph.control_outputs.append(kept)  # TensorFlow does this only outside of TF 1 graphs
        mark = attr_value_pb2.AttrValue(s=result.op.name.encode())
        set_attribute(result.op, "_npu_bridge_transfer", mark)
    return result


def prevent_pruning(result: tf.Tensor) -> tf.Operation:
    """Returns a stateful op that keeps the operator of `result` in the graph, for results that only other ranks need.

    TensorFlow would remove an operator that is only a control dependency. The stateful op reads the operator's result.
    """
    first = tf.reshape(result, [-1])[:1]  # the op reads it on the host
    return tf.raw_ops.Assert(condition=True, data=[first])
