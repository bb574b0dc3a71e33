"""The interface every backend of the collective room implements."""

from __future__ import annotations

import abc
from typing import Any, Sequence


class Communicator(abc.ABC):
    """The ranks of one job and the handful of operations they do together.

    Every operation is collective: all ranks must call it, with the same `name` and in graphs built alike. Operations
    work eagerly, in a `tf.function` and in a TF 1 graph.

    Attributes:
      rank: position of this process among all ranks, from 0.
      size: number of ranks.
      local_rank: position among the ranks of this machine, from 0.
      local_size: number of ranks on this machine.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int

    @abc.abstractmethod
    def all_reduce(self, tensors: Sequence[Any], name: str, average: bool = True, prescale: float = 1.0) -> list:
        """Sums or averages each tensor over the ranks, the whole list as one transfer.

        Args:
          tensors: dense tensors of any shapes and floating or integer dtypes, same list on every rank.
          name: name of the transfer, the same on every rank and unique in its graph.
          average: divide the sums by the number of ranks.
          prescale: factor applied to each tensor before the sum. A power of two loses no bits, and one not above
            1 / size keeps the sum of finite values finite.
        Returns:
          Tensors in the order, shapes and dtypes of `tensors`.
        """

    @abc.abstractmethod
    def all_gather(self, tensor: Any, name: str) -> Any:
        """Joins the tensors of all ranks along axis 0, in rank order; first dimensions may differ."""

    @abc.abstractmethod
    def all_true(self, flag: Any, name: str) -> Any:
        """A boolean scalar that is True on every rank when `flag` is True on every rank, else False everywhere."""

    @abc.abstractmethod
    def broadcast_variables(self, variables: Sequence[Any], root_rank: int) -> Any:
        """Assigns every variable the value it has on `root_rank`.

        Returns:
          The op to run in a TF 1 graph; None when executed eagerly.
        """

    @abc.abstractmethod
    def number_of_root(self, number: int, root_rank: int) -> int:
        """The whole number that `root_rank` passes, on every rank; at once, outside of any graph being built."""
