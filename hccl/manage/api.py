"""Returns this process's rank in the job, and makes groups of ranks.

All functions work with or without a session. The first call that needs the other ranks starts the communication.
"""

from __future__ import annotations

from typing import Any

from npu_bridge import collective
from npu_bridge.base.arguments import is_integer
from npu_bridge.collective import groups
from npu_bridge.collective.groups import WORLD

__all__ = [
    "create_group",
    "create_group_of_others",
    "destroy_group",
    "get_group_rank_from_world_rank",
    "get_local_rank_id",
    "get_local_rank_size",
    "get_rank_id",
    "get_rank_size",
    "get_world_rank_from_group_rank",
]


def create_group(group: str, rank_num: int, rank_ids: list[int]) -> None:
    """Makes a group of ranks that includes this process.

    Every rank of the job must take part at the same time: each rank calls `create_group` with a group that includes the
    rank, or `create_group_of_others`. Groups of different ranks can have the same name. A group's ranks are numbered by
    ascending rank in the job. No other collective can run during the call.

    Args:
      group: a new name of 1 to 127 characters.
      rank_num: number of ranks in the group.
      rank_ids: list of the group's ranks in the job, in any order.
    Raises:
      ValueError: the name is malformed or taken, `rank_num` is not the length of `rank_ids`, or `rank_ids` does not
        consist of different ranks of the job, including this rank.
      RanksMissingError: (a RuntimeError) some rank did not take part within `HCCL_CONNECT_TIMEOUT` seconds, 120 by
        default.
      RuntimeError: the script itself started Horovod in a way that allows no groups.
    Ranks: collective over the whole job.
    Example:
      >>> mine = [rank for rank in range(get_rank_size()) if rank % 2 == get_rank_id() % 2]
      >>> create_group("every_other", len(mine), mine)
    """
    groups.check_group_name(group, "hccl.create_group")
    if not _is_non_negative_int(rank_num) or rank_num == 0:
        raise _make_error("create_group", "rank_num is not a number of ranks", "an integer of at least 1", rank_num)
    if not isinstance(rank_ids, list) or len(rank_ids) != rank_num or not all(map(_is_non_negative_int, rank_ids)):
        raise _make_error(
            "create_group", "rank_ids is not a list of ranks", f"{rank_num} non-negative integers", rank_ids
        )
    groups.groups_of_process().create(group, rank_ids, collective.current())


def create_group_of_others() -> None:
    """Takes part in a `create_group` of other ranks, on a rank that is in none of the new groups.

    Raises:
      RanksMissingError: (a RuntimeError) some rank did not take part within `HCCL_CONNECT_TIMEOUT` seconds, 120 by
        default.
    Ranks: collective over the whole job.
    """
    groups.groups_of_process().take_part_in_creation(collective.current())


def destroy_group(group: str) -> None:
    """Deletes a group of this process and the group's split strategy; the name can be used again.

    Raises:
      ValueError: no group has this name, or the group is the world group.
    """
    groups.groups_of_process().destroy(group)


def get_rank_size(group: str = WORLD) -> int:
    """Returns the number of ranks in the group.

    Args:
      group: name of the group; the world group by default.
    Raises:
      ValueError: no group has this name.
    """
    return groups.find_group(group, "hccl.get_rank_size").size


def get_rank_id(group: str = WORLD) -> int:
    """Returns this process's rank in the group, from 0; raises ValueError if no group has this name."""
    return groups.find_group(group, "hccl.get_rank_id").rank


def get_local_rank_size(group: str = WORLD) -> int:
    """Returns the number of the group's ranks on this machine; raises ValueError if no group has this name."""
    return groups.find_group(group, "hccl.get_local_rank_size").local_size


def get_local_rank_id(group: str = WORLD) -> int:
    """Returns this process's rank among the group's ranks on this machine; raises ValueError for an unknown group."""
    return groups.find_group(group, "hccl.get_local_rank_id").local_rank


def get_world_rank_from_group_rank(group: str, group_rank_id: int) -> int:
    """Converts a rank in a group to the rank in the job.

    Args:
      group: name of the group.
      group_rank_id: rank in the group.
    Raises:
      ValueError: no group has this name, or the group has no such rank.
    """
    members = groups.find_group(group, "hccl.get_world_rank_from_group_rank").members
    if not _is_non_negative_int(group_rank_id) or group_rank_id >= len(members):
        problem = f"group_rank_id is not a rank of group {group!r}"
        expected = f"an integer from 0 to {len(members) - 1}"
        raise _make_error("get_world_rank_from_group_rank", problem, expected, group_rank_id)
    return members[group_rank_id]


def get_group_rank_from_world_rank(world_rank_id: int, group: str) -> int:
    """Converts a rank in the job to the rank in a group.

    The arguments are in the opposite order to those of `get_world_rank_from_group_rank`.

    Args:
      world_rank_id: rank in the job.
      group: name of the group.
    Raises:
      ValueError: no group has this name, or the rank is not in the group.
    """
    members = groups.find_group(group, "hccl.get_group_rank_from_world_rank").members
    if not _is_non_negative_int(world_rank_id) or world_rank_id not in members:
        problem = f"world_rank_id is not a rank in group {group!r}"
        raise _make_error("get_group_rank_from_world_rank", problem, f"one of {list(members)}", world_rank_id)
    return members.index(world_rank_id)


def _is_non_negative_int(value: Any) -> bool:
    return is_integer(value) and value >= 0


def _make_error(function: str, problem: str, expected: str, got: Any) -> ValueError:
    return ValueError(f"hccl.{function}: {problem}. Expected {expected}; got {got!r}. Correct the argument.")
