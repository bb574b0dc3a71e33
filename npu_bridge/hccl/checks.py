"""Checks the arguments of a collective before anything is sent; messages name the op and the rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base.arguments import is_integer
from npu_bridge.base.errors import did_you_mean, message
from npu_bridge.collective import groups
from npu_bridge.collective.communicator import REDUCTIONS, Communicator
from npu_bridge.operators.unavailable import not_available

REDUCIBLE = (tf.int8, tf.int16, tf.int32, tf.int64, tf.float16, tf.bfloat16, tf.float32, tf.float64)
MOVABLE = (*REDUCIBLE, tf.uint8, tf.uint16, tf.uint32, tf.uint64)
BROADCASTABLE = (*MOVABLE, tf.bool, tf.complex64, tf.complex128)
_LARGEST_FUSION_ID = 2**31 - 1


class Call:
    """One call of a collective: its group, and its place for messages.

    Args:
      op: the function, as messages name it.
      group: name of the group it runs in.
    Raises:
      ValueError: there is no such group.
    """

    def __init__(self, op: str, group: str):
        self.op = op
        self.communicator: Communicator = collective.group(group, op)
        self.where = f"{op} (rank {self.communicator.rank} of {self.communicator.size} in {group!r})"

    def error(self, problem: str, expected: str, got: Any, fix: str, kind: type = ValueError) -> Exception:
        """Returns an exception with a five-part message."""
        return kind(message(self.where, problem, expected, str(got), fix))

    def tensor(self, value: Any, dtypes: Sequence[tf.DType], name: str = "tensor") -> tf.Tensor:
        """Returns the value as a dense tensor of one of the dtypes; raises TypeError otherwise."""
        if isinstance(value, (tf.IndexedSlices, tf.SparseTensor, tf.RaggedTensor)):
            fix = "npu_allreduce takes tf.IndexedSlices."
            raise self.error(f"{name} is not dense", "a dense tensor", type(value).__name__, fix, TypeError)
        tensor = tf.convert_to_tensor(value)
        if tensor.dtype not in dtypes:
            expected, got = ", ".join(dtype.name for dtype in dtypes), f"{tensor.dtype.name} of shape {tensor.shape}"
            raise self.error(f"{name} has a dtype that cannot be sent", expected, got, "Cast it.", TypeError)
        return tensor

    def has_rows(self, tensor: tf.Tensor) -> None:
        """Raises ValueError for a scalar."""
        if tensor.shape.rank == 0:
            raise self.error(
                "a scalar has no first dimension", "a tensor of rank 1 or more", "shape ()", "Use tensor[None]."
            )

    def divisible(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns a tensor whose first dimension the group's size divides; raises ValueError if known otherwise."""
        self.has_rows(tensor)
        rows, size = tensor.shape.as_list()[0], self.communicator.size
        if rows is not None and rows % size:
            problem, got = "the first dimension does not divide among the ranks", f"shape {tensor.shape}"
            raise self.error(problem, f"a multiple of rank_size={size}", got, "Pad the tensor.")
        if rows is not None:
            return tensor
        text = f"{self.where}: the first dimension must be a multiple of {size}."
        check = tf.debugging.assert_equal(tf.shape(tensor)[0] % size, 0, message=text)
        with tf.control_dependencies([check] if check is not None else []):
            return tf.identity(tensor)

    def rank_size(self, rank_size: Any) -> None:
        """Raises ValueError when `rank_size` is not the size of the group."""
        if not is_integer(rank_size) or rank_size != self.communicator.size:
            got, fix = repr(rank_size), "Pass get_rank_size(group)."
            raise self.error("rank_size is not the size of the group", f"rank_size={self.communicator.size}", got, fix)

    def group_rank(self, rank: Any, name: str) -> None:
        """Raises ValueError when a rank is not in the group."""
        if not is_integer(rank) or not 0 <= rank < self.communicator.size:
            expected = f"an integer from 0 to {self.communicator.size - 1}"
            fix = "Ranks are counted in the group: see get_group_rank_from_world_rank."
            raise self.error(f"{name} is not a rank of the group", expected, repr(rank), fix)

    def pair(self, other: Any, name: str, sr_tag: Any) -> Communicator:
        """Returns the communicator of this rank and another one, for which a group of just these two must exist."""
        self.group_rank(other, name)
        if not is_integer(sr_tag):
            raise self.error("sr_tag is not a tag", "an integer", repr(sr_tag), "Use one tag in send and receive.")
        communicator = self.communicator
        if other == communicator.rank:
            raise self.error(f"{name} is this rank itself", "another rank", other, "A copy needs no transfer.")
        if tf.executing_eagerly():
            expected = "a graph or a tf.function"
            raise self.error("tags are not known eagerly", expected, "eager execution", "Wrap it.", RuntimeError)
        first, second = communicator.members[communicator.rank], communicator.members[other]
        pair = groups.of_this_process().find_pair(first, second, groups.find(groups.WORLD))
        if pair is None:
            raise self.error(
                "no group connects just the two ranks",
                f"a group of just ranks {first} and {second}",
                f"a group of {communicator.size} ranks",
                f"Make one on all ranks with create_group('pair', 2, [{first}, {second}]), create_group_of_others() "
                f"elsewhere; or use broadcast or all_to_all_v.",
                NotImplementedError,
            )
        return pair

    def reduction(self, reduction: Any) -> None:
        """Raises ValueError for an unknown reduction."""
        if reduction not in REDUCTIONS:
            fix = did_you_mean(reduction, REDUCTIONS, "Use 'sum' and divide for a mean.")
            raise self.error("unknown reduction", ", ".join(map(repr, REDUCTIONS)), repr(reduction), fix)

    def fusion(self, fusion: Any, fusion_id: Any, allowed: Sequence[int] = (0, 2)) -> None:
        """Raises ValueError for a fusion mode that the op does not have, or an id that does not fit the mode."""
        if not is_integer(fusion) or fusion not in allowed:
            raise self.error(
                "unknown fusion mode", f"fusion in {list(allowed)}", repr(fusion), "Use 0: it changes no result."
            )
        fits = is_integer(fusion_id) and (0 <= fusion_id <= _LARGEST_FUSION_ID if fusion == 2 else fusion_id == -1)
        if not fits:
            problem, fix = f"fusion_id does not fit fusion={fusion}", "Leave out both, or give fusion=2 with an id."
            raise self.error(problem, f"0 to {_LARGEST_FUSION_ID}" if fusion == 2 else "-1", repr(fusion_id), fix)

    def per_rank(self, numbers_: Any, name: str) -> tf.Tensor:
        """Returns an int64 vector with one non-negative entry per rank; raises ValueError if known otherwise."""
        vector = tf.cast(tf.convert_to_tensor(numbers_), tf.int64)
        size = self.communicator.size
        if not vector.shape.is_compatible_with([size]):
            raise self.error(
                f"{name} does not have one entry per rank", f"shape ({size},)", f"shape {vector.shape}", "Add entries."
            )
        known = tf.get_static_value(vector)
        if known is not None and (known < 0).any():
            raise self.error(f"{name} has a negative entry", "entries of at least 0", known.tolist(), "Correct it.")
        return tf.ensure_shape(vector, [size])

    def fits(self, flat: tf.Tensor, counts: tf.Tensor, displacements: tf.Tensor) -> None:
        """Raises ValueError when blocks are known to reach beyond the data."""
        known, elements = tf.get_static_value(counts + displacements), flat.shape.num_elements()
        if known is not None and elements is not None and known.max() > elements:
            expected = f"count plus displacement up to the {elements} elements of send_data"
            got, fix = f"{known.tolist()}, one sum per rank", "Counts and displacements are in elements."
            raise self.error("blocks to send reach beyond send_data", expected, got, fix)


def addresses_needed(op: str, alternative: str) -> NotImplementedError:
    """Returns the error of a collective that works on device addresses."""
    return not_available(f"hccl_ops.{op}", "an access by raw device address", alternative)
