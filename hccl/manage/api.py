"""Who this process is among the ranks of the job."""

from __future__ import annotations

from npu_bridge import collective

__all__ = ["get_local_rank_id", "get_local_rank_size", "get_rank_id", "get_rank_size"]

_WORLD_GROUP = "hccl_world_group"
_LONGEST_GROUP_NAME = 127


def get_rank_size(group=_WORLD_GROUP) -> int:
    """The number of ranks in the group.

    Args:
      group: name of the group; the world group by default.
    Raises:
      ValueError: there is no group of that name.
    """
    return _ranks_of(group).size


def get_rank_id(group=_WORLD_GROUP) -> int:
    """This process's rank in the group, from 0; arguments and errors as `get_rank_size`."""
    return _ranks_of(group).rank


def get_local_rank_size(group=_WORLD_GROUP) -> int:
    """The number of ranks of the group on this machine; arguments and errors as `get_rank_size`."""
    return _ranks_of(group).local_size


def get_local_rank_id(group=_WORLD_GROUP) -> int:
    """This process's rank among those on this machine, from 0; arguments and errors as `get_rank_size`."""
    return _ranks_of(group).local_rank


def _ranks_of(group):
    if not isinstance(group, str) or not 0 < len(group) <= _LONGEST_GROUP_NAME:
        raise ValueError(
            f"hccl: group is not a group name. Expected a text of 1 to {_LONGEST_GROUP_NAME} characters; got "
            f"{group!r}. Leave it out for the world group."
        )
    if group != _WORLD_GROUP:
        raise ValueError(
            f"hccl: there is no group {group!r}. Expected {_WORLD_GROUP!r}, which holds every rank; got {group!r}. "
            f"Leave it out for the world group."
        )
    return collective.current()
