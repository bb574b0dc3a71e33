"""Defines `Communicator`, the interface of all engines, and `SeveralRanks`, the part that engines of ranks share."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from npu_bridge.collective.engines.transfer_tensors import (
    all_reduce_dtype,
    broadcast_strings,
    concatenate,
    prevent_folding,
    split_like,
)

REDUCTIONS = ("sum", "max", "min", "prod")


class Communicator(abc.ABC):
    """The ranks of a job, or of a group in it, with their collective operations.

    Every operation is collective: all members must call it, with the same `name` and in equally built graphs.
    Operations work eagerly, in a `tf.function` and in a TF 1 graph.

    Attributes:
      rank: position of this process among the members, from 0.
      size: number of members.
      local_rank: position among the members on this machine, from 0.
      local_size: number of members on this machine.
      members: the members' ranks in the job, ascending; `rank` is a position in `members`.
      runs_can_differ: whether session runs of different ranks can contain different sets of collectives. If not, the
        runs of all ranks must contain the same collectives.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    members: tuple[int, ...]
    runs_can_differ = True

    @abc.abstractmethod
    def all_reduce(
        self, tensors: Sequence[Any], name: str, average: bool = True, prescale: float = 1.0, after: Sequence[Any] = ()
    ) -> list:
        """Sums or averages each tensor over the ranks, the whole list in one collective.

        Args:
          tensors: dense tensors of any shapes and floating or integer dtypes; the same list on every rank.
          name: name of the collective, the same on every rank and unique in its graph.
          average: whether to divide the sums by the number of ranks.
          prescale: factor applied to each tensor before the sum. A power of two loses no bits; a factor of at
            most 1 / size keeps sums of finite values finite.
          after: values to compute before the collective starts. Concatenating and casting do not wait for them.
        Returns:
          Tensors in the order, shapes and dtypes of `tensors`.
        """

    @abc.abstractmethod
    def reduce(self, tensor: Any, reduction: str, name: str) -> Any:
        """Combines the tensors of all ranks element by element; every rank gets the result.

        Args:
          tensor: dense numeric tensor, of the same shape and dtype on every rank.
          reduction: one of `REDUCTIONS`. Integers wrap around as they do in their dtype.
          name: as in `all_reduce`.
        """

    @abc.abstractmethod
    def reduce_scatter(self, tensor: Any, reduction: str, name: str) -> Any:
        """Combines tensors like `reduce`; each rank gets one of `size` equal parts of axis 0, in rank order."""

    @abc.abstractmethod
    def all_gather(self, tensor: Any, name: str) -> Any:
        """Joins the tensors of all ranks along axis 0, in rank order; first dimensions can differ."""

    @abc.abstractmethod
    def all_true(self, flag: Any, name: str) -> Any:
        """Returns a boolean scalar, equal on all ranks: whether `flag` is True on all ranks."""

    @abc.abstractmethod
    def broadcast(self, tensor: Any, root_rank: int, name: str) -> Any:
        """Returns the tensor of `root_rank`; every rank passes a tensor of the same shape and dtype."""

    @abc.abstractmethod
    def broadcast_variables(self, variables: Sequence[Any], root_rank: int) -> Any:
        """Assigns every variable the value it has on `root_rank`.

        Returns:
          The op to run in a TF 1 graph; None when executed eagerly.
        """

    @abc.abstractmethod
    def all_to_all(self, tensor: Any, counts: Any, name: str) -> tuple[Any, Any]:
        """Sends consecutive blocks of axis 0 to the ranks, one block to each.

        Args:
          tensor: the blocks, in rank order.
          counts: integer vector of length `size`, the number of rows of each block; the sum is the rows of `tensor`.
          name: as in `all_reduce`.
        Returns:
          The received blocks, joined in rank order, and their numbers of rows (int32 vector).
        """

    @abc.abstractmethod
    def exchange_integers(
        self, numbers: Sequence[int], exchange_name: str, group_text: str = "its group"
    ) -> list[list[int]]:
        """Sends a list of integers to every rank, immediately and outside of any graph.

        Args:
          numbers: 64-bit integers; the lists of different ranks can differ in length.
          exchange_name: a name for this exchange, unique in the run and the same on every rank.
          group_text: words for the groups that this rank makes, for messages.
        Returns:
          The lists of all ranks, in rank order.
        Raises:
          RanksMissingError: some ranks did not call this within the time limit.
        """

    @abc.abstractmethod
    def open_groups(self, groups: Sequence[tuple[int, ...]], exchange_name: str) -> list[Communicator]:
        """Makes groups of some of the ranks. Every rank of the job must call this, also without being a member.

        Call it right after `exchange_integers`, while no collective is running. Groups stay open until the job ends.

        Args:
          groups: for each group, its members' ranks in this communicator, ascending: at least 2, and not all ranks.
          exchange_name: as in `exchange_integers`.
        Returns:
          The groups in the order of `groups`, without local ranks. In a process outside the group, `rank` is None.
        Raises:
          RuntimeError: the script started Horovod in a way that allows no groups.
        """


class SeveralRanks(Communicator):
    """The base class of communicators of several processes, connected by Horovod or by TensorFlow itself."""

    @abc.abstractmethod
    def _sum_vector(self, vector, name, average):
        """Sums or averages a vector over the ranks, in one all-reduce that starts as soon as the vector is computed."""

    @abc.abstractmethod
    def _broadcast_numbers(self, tensor, root_rank, name):
        """Broadcasts a tensor of any dtype except strings; arguments as for `broadcast`."""

    def _wide_dtype(self, dtype):
        """Returns the dtype in which the engine combines tensors of `dtype`."""
        return all_reduce_dtype(dtype)

    def all_reduce(self, tensors, name, average=True, prescale=1.0, after=()):
        results = [None] * len(tensors)
        for dtype, positions in _positions_by_dtype(tensors).items():
            wide = [tf.cast(tensors[position], self._wide_dtype(dtype)) for position in positions]
            if prescale == 1.0:
                vector = concatenate(prevent_folding(wide))
            else:
                vector = concatenate(wide) * prevent_folding([tf.constant(prescale, wide[0].dtype)])[0]
            with tf.control_dependencies(after):
                vector = tf.identity(vector)
            total = self._sum_vector(vector, f"{name}_{dtype.name}", average)
            for position, tensor in zip(positions, split_like(total, wide)):
                results[position] = tf.cast(tensor, dtype)
        return results

    def all_true(self, flag, name):
        # Counts "no" votes: Sum is the only reduction that every Horovod controller has for int32.
        votes = tf.cast(tf.logical_not(flag), tf.int32)
        return tf.equal(self.reduce(votes, "sum", name), 0)

    def broadcast(self, tensor, root_rank, name):
        if tensor.dtype == tf.string:
            return broadcast_strings(root_rank, tensor, lambda part, of: self.all_gather(part, f"{name}_{of}"))
        return self._broadcast_numbers(tensor, root_rank, name)

    def broadcast_variables(self, variables, root_rank):
        assigned = [
            variable.assign(
                # Named by position: a variable's name includes its scopes, which can differ between ranks.
                self.broadcast(tf.convert_to_tensor(variable), root_rank, f"broadcast_{position}")
            )
            for position, variable in enumerate(variables)
        ]
        return None if tf.executing_eagerly() else tf.group(*assigned)


def _positions_by_dtype(tensors):
    """Returns the positions of tensors by dtype, because an all-reduce has one dtype."""
    groups = {}
    for position, tensor in enumerate(tensors):
        groups.setdefault(tf.as_dtype(tensor.dtype).base_dtype, []).append(position)
    return groups
