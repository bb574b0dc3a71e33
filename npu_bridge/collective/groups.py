"""Keeps named groups of ranks, each with its own collective operations.

A name belongs to one process: another process can use the name for other ranks ("my data-parallel group"). All groups
with the same members share one Horovod process set, whatever their names. Horovod makes a process set only if every
rank of the job takes part. So all ranks meet in each `create`: each rank announces the members of its group, then all
ranks open the new sets in one order. A rank that wants no group calls `take_part_in_creation`.

Ranks in a group are numbered by ascending rank in the job, in whatever order they were listed.
"""

from __future__ import annotations

import functools
import platform
import zlib
from collections.abc import Sequence

from npu_bridge.base import environment
from npu_bridge.collective.engines.communicator import Communicator
from npu_bridge.collective.engines.single_process import SingleProcess
from npu_bridge.collective.fragments import SplitStrategies
from npu_bridge.collective.this_process import current

WORLD = "hccl_world_group"
LONGEST_NAME = 127


class RankGroups:
    """The named groups of this process, and the sets of ranks for which the job has opened communicators.

    Attributes:
      strategies: the ways to split gradients into fragments, by group name.
    """

    def __init__(self):
        self.strategies = SplitStrategies()
        self._members_by_name: dict[str, tuple[int, ...]] = {}
        self._opened: dict[tuple[int, ...], Communicator] = {}
        self._meetings = 0

    def create(self, name: str, rank_ids: Sequence[int], whole_job: Communicator) -> None:
        """Makes a group that contains this process.

        Args:
          name: a name that this process has not used yet.
          rank_ids: ranks of the members in the job, in any order.
          whole_job: the communicator of the job.
        Raises:
          ValueError: the name is taken, or the ranks are not different ranks of the job including this one; raised
            before the ranks meet.
          RanksMissingError: some ranks did not call this in time.
          RuntimeError: the script started Horovod without support for groups.
        Ranks: collective over the whole job, not just over the members.
        """
        self._check_new_group(name, rank_ids, whole_job)
        members = tuple(sorted(rank_ids))
        self._open_process_sets_on_all_ranks(
            members, whole_job, f"group {name!r} of ranks {', '.join(map(str, members))}"
        )
        self._members_by_name[name] = members

    def take_part_in_creation(self, whole_job: Communicator) -> None:
        """Takes part in a `create` of other ranks, without becoming a member of a group."""
        self._open_process_sets_on_all_ranks((), whole_job, "groups of other ranks")

    def destroy(self, name: str) -> None:
        """Removes a group's name and split strategy from this process.

        The set of members stays open, so that making the group again costs nothing.

        Raises:
          ValueError: the group does not exist, or is the world group.
        """
        check_group_name(name, "hccl.destroy_group")
        if name == WORLD:
            raise ValueError(
                f"hccl.destroy_group: the world group cannot be destroyed. Expected a group made by create_group; got "
                f"{name!r}. Leave the call out."
            )
        self._known_members(name, "hccl.destroy_group")
        del self._members_by_name[name]
        self.strategies.reset(name)

    def find(self, name: str, whole_job: Communicator, where: str = "hccl") -> Communicator:
        """Returns the communicator of a group with this name in this process; `whole_job` for the world group.

        Raises:
          ValueError: the name is not a group name, or this process has no group of that name.
        """
        check_group_name(name, where)
        if name == WORLD:
            return whole_job
        members = self._known_members(name, where)
        if members == whole_job.members:
            return whole_job
        return SingleProcess(members[0]) if len(members) == 1 else self._opened[members]

    def find_pair(self, first_rank: int, second_rank: int, whole_job: Communicator) -> Communicator | None:
        """Returns the communicator of exactly these two ranks of the job, or None; both ranks get the same result."""
        members = tuple(sorted((first_rank, second_rank)))
        return whole_job if members == whole_job.members else self._opened.get(members)

    def _known_members(self, name, where):
        if name not in self._members_by_name:
            known = ", ".join(map(repr, [WORLD, *sorted(self._members_by_name)]))
            raise ValueError(
                f"{where}: there is no group {name!r} in this process. Expected one of {known}; got {name!r}. Make "
                f"the group with create_group, or leave the name out for the world group."
            )
        return self._members_by_name[name]

    def _check_new_group(self, name, rank_ids, whole_job):
        where = f"hccl.create_group (rank {whole_job.rank} of {whole_job.size})"
        check_group_name(name, where)
        if name == WORLD or name in self._members_by_name:
            raise ValueError(
                f"{where}: this process already has a group of that name. Expected a new name; got {name!r}. Choose "
                f"another name, or destroy the old group first."
            )
        if len(set(rank_ids)) != len(rank_ids) or not set(rank_ids) <= set(range(whole_job.size)):
            raise ValueError(
                f"{where}: rank_ids does not list ranks of the job. Expected different integers from 0 to "
                f"{whole_job.size - 1}; got {list(rank_ids)}. Correct the list for group {name!r}."
            )
        if whole_job.rank not in rank_ids:
            raise ValueError(
                f"{where}: rank_ids lacks this rank. Expected a list with {whole_job.rank}; got {list(rank_ids)}. Add "
                f"the rank, or call hccl.manage.api.create_group_of_others() on this rank: every rank of the job takes "
                f"part."
            )

    def _open_process_sets_on_all_ranks(self, wanted_members, whole_job, group_text):
        """Exchanges the wanted members with all ranks, then opens new sets on all ranks in one order."""
        meeting = f"create_group_{self._meetings}"
        host = environment.read_variable("HOROVOD_HOSTNAME") or platform.node()  # equal on all ranks of a machine
        answers = whole_job.exchange_integers([zlib.crc32(host.encode()), *wanted_members], meeting, group_text)
        self._meetings += 1
        hosts = [answer[0] for answer in answers]
        sets = {tuple(answer[1:]) for answer in answers}.difference(self._opened)
        new = sorted(members for members in sets if 1 < len(members) < whole_job.size)
        for members, group in zip(new, whole_job.open_groups(new, meeting) if new else []):
            neighbours = [member for member in members if hosts[member] == hosts[whole_job.rank]]
            group.local_size = len(neighbours)
            group.local_rank = neighbours.index(whole_job.rank) if whole_job.rank in neighbours else None
            self._opened[members] = group


@functools.cache
def groups_of_process() -> RankGroups:
    """Returns the groups of this process.

    Documented functions name a group by a text only, in graphs and eagerly, so they need a table of names. The table
    mirrors Horovod's process sets, which belong to the process. So each process has one `RankGroups` object, made at
    its first use.
    """
    return RankGroups()


def find_group(name: str = WORLD, where: str = "hccl") -> Communicator:
    """Returns the communicator of a group of this process; starts Horovod if needed. Errors: see `RankGroups.find`."""
    return groups_of_process().find(name, current(), where)


def check_group_name(name, where: str) -> None:
    """Checks the form of a group name.

    Raises:
      ValueError: the name is not a text of 1 to 127 characters.
    """
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME:
        raise ValueError(
            f"{where}: group is not a group name. Expected a text of 1 to {LONGEST_NAME} characters; got {name!r}. "
            f"Leave the name out for the world group."
        )


def members_label(communicator: Communicator) -> str:
    """Returns a short text that identifies the members, for names of their collectives; equal on all members."""
    members = communicator.members
    if members == tuple(range(members[-1] + 1)):
        return f"first{len(members)}"
    text = "_".join(map(str, members))
    return text if len(text) <= 24 else f"{len(members)}of{zlib.crc32(text.encode()):08x}"
