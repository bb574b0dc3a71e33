"""Checks that ranks of a group run the same collective operations outside of optimizers, in the same order."""

from __future__ import annotations

import dataclasses
import json
from typing import NamedTuple

import tensorflow as tf

from npu_bridge.collective import agreement, first_run, groups, wire_names
from npu_bridge.collective.communicator import Communicator

# A rank waits this long at its first run for the plans of others; then it continues, and the last rank compares. It
# would wait in the collective anyway, but could no longer report the cause there.
_PATIENCE_SECS = 20.0


class Transfer(NamedTuple):
    """One collective.

    Attributes:
      what: the collective with its arguments, which must be equal on every rank.
      dtype: name of the tensor's dtype.
      shape: list of its dimensions, None for an unknown one; None if the whole shape is unknown or can differ.
    """

    what: str
    dtype: str
    shape: list | None

    def fits(self, other: Transfer) -> bool:
        """Returns whether two ranks can run these as one collective."""
        shapes = tf.TensorShape(self.shape), tf.TensorShape(other.shape)
        return self[:2] == other[:2] and shapes[0].is_compatible_with(shapes[1])

    def __str__(self):
        shape = "" if self.shape is None else f" of shape {tuple(self.shape)}"
        return f"{self.what} of {self.dtype}{shape}"


@dataclasses.dataclass
class PlanOfTransfers:
    """The collectives of one rank in one group.

    Attributes:
      owner: the collectives' owner, for messages; the same on every rank of the group.
      transfers: in the order in which they were built.
    """

    owner: str
    transfers: list[Transfer] = dataclasses.field(default_factory=list)

    def to_text(self) -> str:
        """Returns the plan as JSON."""
        return json.dumps([self.owner, self.transfers])

    @classmethod
    def from_text(cls, text: str) -> PlanOfTransfers:
        """Parses a plan that `to_text` wrote."""
        owner, transfers = json.loads(text)
        return cls(owner, [Transfer(*transfer) for transfer in transfers])

    def difference_from(self, reference: PlanOfTransfers) -> agreement.Difference | None:
        """Returns the first difference from rank 0's plan, or None."""
        fix = "Build the same collectives in the same order on every rank."
        for number, (right, wrong) in enumerate(zip(reference.transfers, self.transfers)):
            if not right.fits(wrong):
                return agreement.Difference(
                    "are about to transfer different things", f"{right} as number {number}", str(wrong), fix
                )
        expected, got = len(reference.transfers), len(self.transfers)
        if expected != got:
            longer = (reference if expected > got else self).transfers
            number = min(expected, got)
            sides = [str(longer[number]) if number < count else "nothing" for count in (expected, got)]
            return agreement.Difference(
                "transfer different numbers of things",
                f"{expected} transfers, number {number} being {sides[0]},",
                f"{got}, with {sides[1]} there",
                fix,
            )
        return None


def announce(communicator: Communicator, what: str, tensor: tf.Tensor, may_differ: bool = False) -> str:
    """Notes a collective right before it is built.

    Args:
      what: the collective, with the arguments that must be equal on every rank.
      tensor: this rank's input, or output.
      may_differ: ranks can pass tensors of different shapes.
    Returns:
      The collective's name: equal on the ranks of the group, whatever other groups they are in. Collectives of one
      group share a numbering: if a rank runs another collective, Horovod reports it instead of waiting.
    """
    name = wire_names.next_in_row(f"hccl_{groups.label(communicator)}")
    graph = wire_names.counting_graph()
    if communicator.size > 1 and graph is not None and not graph.building_function:
        known = tensor.shape.rank is not None and not may_differ
        plan = first_run.check_of(graph, communicator.members, lambda: _GraphList(communicator))
        plan.add(Transfer(what, tensor.dtype.name, tensor.shape.as_list() if known else None), name)
    return name


class _GraphList(first_run.Check):
    """The collectives of this rank in one group and one graph."""

    def __init__(self, communicator):
        super().__init__()
        self._communicator = communicator
        members = communicator.members
        some = ", ".join(map(str, members if len(members) <= 4 else (*members[:2], "...", members[-1])))
        self._plan = PlanOfTransfers(f"hccl_ops among ranks {some}")
        self._compared = 0

    def add(self, transfer, name):
        self._plan.transfers.append(transfer)
        self.transfers.add(wire_names.full(name))

    def is_due(self, session):
        return len(self._plan.transfers) > self._compared

    def act(self, session, run):
        self._compared = len(self._plan.transfers)
        ranks = self._communicator
        agreement.of_this_process().check(
            self._plan, ranks.rank, ranks.size, ranks.members, _PATIENCE_SECS, wire_names.label()
        )
