"""Checks that the ranks of a group run the same collectives, outside of optimizers, in the same order."""

from __future__ import annotations

import dataclasses
import json
from typing import NamedTuple

import tensorflow as tf

from npu_bridge.collective import groups, wire_names
from npu_bridge.collective.checks import agreement, first_run
from npu_bridge.collective.engines.communicator import Communicator

# How long a rank waits at its first run for the plans of others. Then it continues, and the last rank compares the
# plans. The rank would wait in the collective anyway, but could no longer report the cause there.
_PATIENCE_SECS = 20.0


class PlannedCollective(NamedTuple):
    """A collective in a plan.

    Attributes:
      what: the collective with its arguments, which must be equal on every rank.
      dtype: name of the tensor's dtype.
      shape: list of the tensor's dimensions, with None for an unknown dimension; None if the shape is unknown, or can
        differ between ranks.
    """

    what: str
    dtype: str
    shape: list | None

    def can_run_with(self, other: PlannedCollective) -> bool:
        """Returns whether this collective on one rank can run together with `other` on another rank."""
        shapes = tf.TensorShape(self.shape), tf.TensorShape(other.shape)
        return self[:2] == other[:2] and shapes[0].is_compatible_with(shapes[1])

    def __str__(self):
        shape = "" if self.shape is None else f" of shape {tuple(self.shape)}"
        return f"{self.what} of {self.dtype}{shape}"


@dataclasses.dataclass
class CollectivesPlan:
    """The plan of one rank in one group: its collectives.

    Attributes:
      owner: the collectives' owner, for messages; the same on every rank of the group.
      transfers: the collectives, in the order in which they were built.
    """

    owner: str
    transfers: list[PlannedCollective] = dataclasses.field(default_factory=list)

    def to_text(self) -> str:
        """Returns the plan as JSON."""
        return json.dumps([self.owner, self.transfers])

    @classmethod
    def from_text(cls, text: str) -> CollectivesPlan:
        """Parses a plan that `to_text` wrote."""
        owner, transfers = json.loads(text)
        return cls(owner, [PlannedCollective(*transfer) for transfer in transfers])

    def difference_from(self, reference: CollectivesPlan) -> agreement.PlanDifference | None:
        """Returns the first difference from rank 0's plan, or None."""
        fix = "Build the same collectives in the same order on every rank."
        for number, (right, wrong) in enumerate(zip(reference.transfers, self.transfers)):
            if not right.can_run_with(wrong):
                return agreement.PlanDifference(
                    "are about to run different collectives", f"{right} at position {number}", str(wrong), fix
                )
        expected, got = len(reference.transfers), len(self.transfers)
        if expected != got:
            longer = (reference if expected > got else self).transfers
            number = min(expected, got)
            sides = [str(longer[number]) if number < count else "nothing" for count in (expected, got)]
            return agreement.PlanDifference(
                "run different numbers of collectives",
                f"{expected} collectives, with {sides[0]} at position {number},",
                f"{got}, with {sides[1]} at this position",
                fix,
            )
        return None


def announce_collective(
    communicator: Communicator, description: str, tensor: tf.Tensor, may_differ: bool = False
) -> str:
    """Adds a collective to the plan of its group, right before it is built, and returns its name.

    Args:
      description: the collective, with the arguments that must be equal on every rank.
      tensor: this rank's input or output.
      may_differ: whether the shapes of ranks can differ.
    Returns:
      The collective's name. It is equal on all ranks of the group, even if they are in other groups, too. One counter
      numbers all collectives of the group, so that Horovod reports ranks that call different collectives; otherwise
      these ranks would wait for each other forever.
    """
    name = wire_names.next_collective_name(f"hccl_{groups.members_label(communicator)}")
    graph = wire_names.graph_numbering_collectives()
    if communicator.size > 1 and graph is not None and not graph.building_function:
        known = tensor.shape.rank is not None and not may_differ
        plan = first_run.find_or_add_check(graph, communicator.members, lambda: _GraphCollectivesCheck(communicator))
        plan.add(PlannedCollective(description, tensor.dtype.name, tensor.shape.as_list() if known else None), name)
    return name


class _GraphCollectivesCheck(first_run.FirstRunCheck):
    """The check of this rank's collectives in one group and one graph."""

    def __init__(self, communicator):
        super().__init__()
        self._communicator = communicator
        members = communicator.members
        some = ", ".join(map(str, members if len(members) <= 4 else (*members[:2], "...", members[-1])))
        self._plan = CollectivesPlan(f"hccl_ops among ranks {some}")
        self._compared = 0

    def add(self, transfer, name):
        self._plan.transfers.append(transfer)
        self.transfers.add(wire_names.full_collective_name(name))

    def is_due(self, session):
        return len(self._plan.transfers) > self._compared

    def make_check(self, session, run):
        self._compared = len(self._plan.transfers)
        ranks = self._communicator
        agreement.agreements_of_process().check(
            self._plan, ranks.rank, ranks.size, ranks.members, _PATIENCE_SECS, wire_names.current_collectives_label()
        )
