"""Checks the arguments of a collective before anything is sent; error messages name the collective and the rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base.arguments import is_integer
from npu_bridge.base.errors import did_you_mean, message
from npu_bridge.collective import groups
from npu_bridge.collective.composed import forbid_gradient, keep_in_function
from npu_bridge.collective.engines.communicator import REDUCTIONS, Communicator
from npu_bridge.operators.unavailable import not_available_error

REDUCIBLE = (tf.int8, tf.int16, tf.int32, tf.int64, tf.float16, tf.bfloat16, tf.float32, tf.float64)
MOVABLE = (*REDUCIBLE, tf.uint8, tf.uint16, tf.uint32, tf.uint64)
BROADCASTABLE = (*MOVABLE, tf.bool, tf.complex64, tf.complex128)
_LARGEST_FUSION_ID = 2**31 - 1


class CollectiveCall:
    """A call of a collective, with the group that it uses and the first words of its error messages.

    Args:
      op: name of the collective in error messages.
      group: name of the group in which the collective runs.
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

    def finish(self, result: tf.Tensor, arguments: str = "") -> tf.Tensor:
        """Returns the result of a collective that has no gradient; `arguments` are words for messages."""
        return forbid_gradient(keep_in_function(self.communicator, result), f"{self.op}{arguments}")

    def dense_tensor(self, value: Any, dtypes: Sequence[tf.DType], name: str = "tensor") -> tf.Tensor:
        """Returns the value as a dense tensor of one of the dtypes; raises TypeError if that is not possible."""
        if isinstance(value, (tf.IndexedSlices, tf.SparseTensor, tf.RaggedTensor)):
            fix = "Use npu_allreduce, which takes tf.IndexedSlices."
            raise self.error(f"{name} is not dense", "a dense tensor", type(value).__name__, fix, TypeError)
        tensor = tf.convert_to_tensor(value)
        if tensor.dtype not in dtypes:
            expected, got = ", ".join(dtype.name for dtype in dtypes), f"{tensor.dtype.name} of shape {tensor.shape}"
            raise self.error(f"{name} has a dtype that cannot be sent", expected, got, "Cast the tensor.", TypeError)
        return tensor

    def check_has_rows(self, tensor: tf.Tensor) -> None:
        """Raises ValueError for a scalar."""
        if tensor.shape.rank == 0:
            raise self.error(
                "a scalar has no first dimension", "a tensor of rank 1 or more", "shape ()", "Use tensor[None]."
            )

    def check_divisible(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns `tensor`; raises an error if the size of the group does not divide the first dimension of `tensor`.

        The error is a ValueError. If only the run shows the dimension, the run raises an InvalidArgumentError.
        """
        self.check_has_rows(tensor)
        rows, size = first_dimension(tensor), self.communicator.size
        if rows is not None and rows % size:
            problem, got = "the first dimension does not divide among the ranks", f"{rows} in shape {tensor.shape}"
            raise self.error(problem, f"a multiple of rank_size={size}", got, "Pad the tensor.")
        if rows is not None:
            return tensor
        text = f"{self.where}: the first dimension must be a multiple of {size}."
        check = tf.debugging.assert_equal(tf.shape(tensor)[0] % size, 0, message=text)
        with tf.control_dependencies([check] if check is not None else []):
            return tf.identity(tensor)

    def check_rank_size(self, rank_size: Any) -> None:
        """Raises ValueError if `rank_size` is not the size of the group."""
        if not is_integer(rank_size) or rank_size != self.communicator.size:
            got, fix = repr(rank_size), "Pass get_rank_size(group)."
            raise self.error("rank_size is not the size of the group", f"rank_size={self.communicator.size}", got, fix)

    def check_group_rank(self, rank: Any, name: str) -> None:
        """Raises ValueError if `rank` is not a rank of the group."""
        if not is_integer(rank) or not 0 <= rank < self.communicator.size:
            expected = f"an integer from 0 to {self.communicator.size - 1}"
            fix = "Pass the rank in the group, from get_group_rank_from_world_rank."
            raise self.error(f"{name} is not a rank of the group", expected, repr(rank), fix)

    def find_pair(self, other_rank: Any, name: str, sr_tag: Any) -> Communicator:
        """Returns the communicator of this rank and one other rank; raises an error if no group has just these two."""
        self.check_group_rank(other_rank, name)
        if not is_integer(sr_tag):
            raise self.error(
                "sr_tag is not an integer", "an integer", repr(sr_tag), "Use one integer in send and receive."
            )
        communicator = self.communicator
        if other_rank == communicator.rank:
            raise self.error(f"{name} is this rank itself", "another rank", other_rank, "Use the tensor itself.")
        if tf.executing_eagerly():
            expected = "a graph or a tf.function"
            raise self.error(
                "calls cannot be matched by tags in eager execution",
                expected,
                "eager execution",
                "Make the call in a tf.function.",
                RuntimeError,
            )
        first, second = communicator.members[communicator.rank], communicator.members[other_rank]
        pair = groups.groups_of_process().find_pair(first, second, groups.find_group(groups.WORLD))
        if pair is None:
            raise self.error(
                "no group consists of just the two ranks",
                f"a group of just ranks {first} and {second}",
                f"a group of {communicator.size} ranks",
                f"Call create_group('pair', 2, [{first}, {second}]) on these ranks and create_group_of_others() "
                f"on all others; or use broadcast or all_to_all_v.",
                NotImplementedError,
            )
        return pair

    def check_reduction(self, reduction: Any) -> None:
        """Raises ValueError for an unknown reduction."""
        if reduction not in REDUCTIONS:
            fix = did_you_mean(reduction, REDUCTIONS, "Use 'sum' and divide for a mean.")
            raise self.error("unknown reduction", ", ".join(map(repr, REDUCTIONS)), repr(reduction), fix)

    def check_fusion(
        self, fusion: Any, fusion_id: Any, allowed: Sequence[int] = (0, 2), id_without_fusion: int = -1
    ) -> None:
        """Raises ValueError if the op does not have the fusion mode, or the id does not fit the mode.

        Without fusion, the id is -1; `id_without_fusion`, the default of the op, is accepted, too.
        """
        if not is_integer(fusion) or fusion not in allowed:
            raise self.error(
                "unknown fusion mode",
                f"fusion in {list(allowed)}",
                repr(fusion),
                "Use 0: results do not change.",
            )
        others = (-1, id_without_fusion)
        fits = is_integer(fusion_id) and (0 <= fusion_id <= _LARGEST_FUSION_ID if fusion == 2 else fusion_id in others)
        if not fits:
            problem, fix = f"fusion_id does not fit fusion={fusion}", "Leave out both, or give fusion=2 with an id."
            raise self.error(problem, f"0 to {_LARGEST_FUSION_ID}" if fusion == 2 else "-1", repr(fusion_id), fix)

    def entries_per_rank(self, values: Any, name: str) -> tf.Tensor:
        """Returns `values` as an int64 vector; raises ValueError unless there is one non-negative entry per rank."""
        vector = tf.cast(tf.convert_to_tensor(values), tf.int64)
        size = self.communicator.size
        if not vector.shape.is_compatible_with([size]):
            raise self.error(
                f"{name} does not have one entry per rank",
                f"shape ({size},)",
                f"shape {vector.shape}",
                "Give one entry for each rank.",
            )
        known = tf.get_static_value(vector)
        if known is not None and (known < 0).any():
            raise self.error(
                f"{name} has a negative entry", "entries of at least 0", known.tolist(), "Correct the negative entries."
            )
        return tf.ensure_shape(vector, [size])

    def check_blocks_fit(self, flat: tf.Tensor, counts: tf.Tensor, displacements: tf.Tensor) -> None:
        """Raises ValueError if a block is known to reach beyond the data."""
        known, elements = tf.get_static_value(counts + displacements), flat.shape.num_elements()
        if known is not None and elements is not None and known.max() > elements:
            expected = f"sums of count and displacement up to the {elements} elements of send_data"
            got, fix = f"{known.tolist()}, one sum per rank", "Give counts and displacements in elements."
            raise self.error("a block reaches beyond the end of send_data", expected, got, fix)


def device_address_error(op: str, alternative: str) -> NotImplementedError:
    """Returns the error of a collective that needs raw device addresses."""
    return not_available_error(f"hccl_ops.{op}", "an access by raw device address", alternative)


def first_dimension(tensor: tf.Tensor) -> int | None:
    """Returns the static size of the first dimension; None if it is unknown, or the number of dimensions is."""
    return tensor.shape.as_list()[0] if tensor.shape.rank is not None else None


def shape_with_rows(tensor: tf.Tensor, rows: int | None) -> tf.TensorShape:
    """Returns the static shape of a tensor with another size of the first dimension."""
    return tf.TensorShape([rows]).concatenate(tensor.shape[1:])
