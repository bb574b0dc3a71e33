"""Prepares tensors for the operators of both engines: casts dtypes, concatenates, and keeps operators in the graph.

Both engines lack some dtypes. An all-gather, a broadcast or an all-to-all only copies elements, so it can send them as
any dtype of the same width. An all-reduce adds them up, so it needs a dtype that can represent the sum. If casts around
a collective hide the numbers that are sent, the graph notes them (`note_exchange`), so that graph passes need not
recognise the casts. The tables here are those of Horovod 0.28.

TensorFlow 2.15 treats Horovod's operators as pure functions: when it optimises the graph, it evaluates one with
constant inputs (constant folding), and merges two with the same inputs. If it does so on one rank only, the others wait
for ever. `prevent_folding` and `prevent_merging` keep every operator in the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Callable

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from npu_bridge.base.tf_internals.graphs import is_branch_or_body, run_iterations_in_turn, set_attribute

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

# Makes 64 bytes for 16-bit elements and more for wider ones, which TensorFlow calls aligned.
_ALIGNED_ELEMENTS = 32
_SENT_BY = "_npu_bridge_sent_by"
_ENDS = ("Bitcast", "HorovodAllgather")  # types of ops that can carry a note; searching all ops is slow


def all_reduce_dtype(dtype: tf.DType) -> tf.DType:
    """Returns the dtype in which tensors of `dtype` are reduced."""
    return _WIDER.get(dtype, dtype)


def reduce_scatter_dtype(dtype: tf.DType) -> tf.DType:
    """Returns the dtype in which tensors of `dtype` are reduced and scattered."""
    return _SCATTER_WIDER.get(dtype, dtype)


def moved_as_bits(
    tensor: tf.Tensor,
    move: Callable[[tf.Tensor], Any],
    is_noted: bool = False,
    carriers: Mapping[tf.DType, tf.DType] = _SAME_BITS,
) -> tf.Tensor:
    """Applies `move`, which only copies elements, to a tensor of any dtype, as bits of a dtype that can be sent.

    Args:
      is_noted: a changed dtype is noted in the graph; see `note_exchange`.
      carriers: the dtypes that are sent as others; here those of Horovod.
    """
    carrier = carriers.get(tensor.dtype)
    if carrier is None:
        return move(tensor)
    bits = tf.bitcast(tensor, carrier)
    result = tf.bitcast(move(bits), tensor.dtype)
    return note_exchange(bits, result) if is_noted and tensor.dtype.is_floating else result


def note_exchange(first: tf.Tensor, arrived: tf.Tensor) -> tf.Tensor:
    """Notes in a graph that floating-point numbers are sent to other ranks and come back; returns `arrived`.

    No number that arrives is larger than the largest number that any rank has sent.

    Args:
      first: the output of the first op on the way; this op's first input holds the numbers to send.
      arrived: the numbers that come back, in the original dtype; a later note for this tensor replaces this one.
    """
    if not tf.executing_eagerly():
        set_attribute(arrived.op, _SENT_BY, attr_value_pb2.AttrValue(s=first.op.name.encode()))
    return arrived


def sender_of(op: tf.Operation) -> tf.Operation | None:
    """Returns the op whose first input was sent, for an op whose output arrived; None without a note."""
    if op.type not in _ENDS or _SENT_BY not in op.node_def.attr:
        return None
    try:
        return op.graph.get_operation_by_name(op.get_attr(_SENT_BY).decode())
    except KeyError:  # a copy in another graph, with other names
        return None


def texts_of_rank(rank: int, tensor: tf.Tensor, all_gather: Callable[[tf.Tensor, str], tf.Tensor]) -> tf.Tensor:
    """Returns the strings of one rank on all ranks; Horovod has no strings, so their bytes are gathered.

    Args:
      rank: the rank whose strings are sent.
      tensor: strings, in the same shape on all ranks.
      all_gather: joins the vectors of the ranks, which can differ in length; its second argument is a name.
    """
    letters = tf.io.decode_raw(tf.io.serialize_tensor(tensor), tf.uint8)
    lengths = all_gather(tf.shape(letters), "lengths")
    start = tf.reduce_sum(lengths[:rank])
    own = all_gather(letters, "letters")[start : start + lengths[rank]]
    characters = tf.constant([bytes([number]) for number in range(256)])
    text = tf.strings.reduce_join(tf.gather(characters, tf.cast(own, tf.int32)))
    return tf.ensure_shape(tf.io.parse_tensor(text, tf.string), tensor.shape)


def concatenated(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Concatenates tensors of one dtype to a vector; returns a single tensor unchanged.

    Horovod's one thread copies the tensors of a group into a buffer and back while the network is idle. It sends a
    single tensor in place, and TensorFlow's threads concatenate while other tensors are being sent.
    """
    if len(tensors) == 1:
        return tensors[0]
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0)


def split_like(whole: tf.Tensor, tensors: Sequence[tf.Tensor]) -> list:
    """Splits a vector as long as `concatenated(tensors)` into tensors of their shapes."""
    return [_shaped(part, tensor) for part, tensor in zip(_parts(whole, tensors), tensors)]


def _parts(whole, tensors):
    if len(tensors) == 1:
        return [whole]
    counts = [element_count(tensor) for tensor in tensors]
    if all(isinstance(count, int) and count % _ALIGNED_ELEMENTS == 0 for count in counts):
        # Rows of aligned parts share the memory of the whole; others are copied.
        rows = tf.reshape(whole, [-1, _ALIGNED_ELEMENTS])
        return tf.split(rows, [count // _ALIGNED_ELEMENTS for count in counts])
    return tf.split(whole, counts, num=len(counts))


def _shaped(part, tensor):
    if tensor.shape.is_fully_defined():
        return part if part.shape == tensor.shape else tf.reshape(part, tensor.shape)
    return tf.reshape(part, tf.shape(tensor))


def element_count(tensor: tf.Tensor) -> Any:
    """Returns the number of elements: an int if the static shape shows it, to keep the graph small; else a tensor."""
    count = tensor.shape.num_elements()
    return tf.size(tensor) if count is None else count


def prevent_folding(tensors: Sequence[tf.Tensor]) -> list:
    """Returns a collective operator's inputs with one replaced by a stateful copy, which prevents constant folding.

    The smallest input is copied; copies are stateful and exist on every device.
    """
    tensors = list(tensors)
    if not tf.executing_eagerly():
        smallest = min(range(len(tensors)), key=lambda position: tensors[position].shape.num_elements() or 0)
        tensors[smallest] = tf.raw_ops.DeepCopy(x=tensors[smallest])
    return tensors


def prevent_merging(result: tf.Tensor) -> tf.Tensor:
    """Gives the operator of a result a unique attribute, so that TensorFlow does not merge it with another.

    In a loop, also keeps it from starting again under the same name before it has finished.
    """
    if not tf.executing_eagerly():
        run_iterations_in_turn(result.op)
        if is_branch_or_body(result.graph):
            kept = never_pruned(result)  # the next iteration waits for all stateful operators
            if not tf.compat.v1.executing_eagerly_outside_functions():
                result.graph.control_outputs.append(kept)  # TensorFlow does this only outside of TF 1 graphs
        mark = attr_value_pb2.AttrValue(s=result.op.name.encode())
        set_attribute(result.op, "_npu_bridge_transfer", mark)
    return result


def never_pruned(result: tf.Tensor) -> tf.Operation:
    """Returns an op that keeps a collective operator in the graph if only other ranks need its result.

    TensorFlow removes an operator that is only a control dependency, so a stateful op reads its result.
    """
    first = tf.reshape(result, [-1])[:1]  # the op reads it on the host
    return tf.raw_ops.Assert(condition=True, data=[first])
