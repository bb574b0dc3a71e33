"""Divides a list of items into a part for each owner, so that the parts have about equal sizes."""

from __future__ import annotations

from collections.abc import Sequence

from npu_bridge.base.errors import message


def fair_division(sizes: Sequence[int], owner_count: int) -> list[int]:
    """Divides a list of items into consecutive parts of about equal size, one part for each owner.

    The target of each part is an equal share of the remaining items. Items larger than all smaller remaining items
    together are left out of the share: each will fill a part alone. A part always takes its first item and takes more
    items up to its target. The part takes one more item if the excess with this item is no larger than the
    shortfall without it.

    Args:
      sizes: size of each item, in any unit; can be 0.
      owner_count: number of owners, at least 1.
    Returns:
      The owner of each item, ascending from 0; every owner has at least one item.
    Raises:
      ValueError: there are fewer items than owners.
    Example: fair_division([40, 30, 20, 10], 2) gives [0, 1, 1, 1].
    """
    if owner_count > len(sizes):
        raise ValueError(
            message(
                "fair_division",
                "there are fewer gradients than ranks",
                f"at least {owner_count} gradients for {owner_count} ranks",
                str(len(sizes)),
                "Use fewer ranks, or is_weight_update_sharding=False.",
            )
        )
    result: list[int] = []
    for owner in range(owner_count - 1):
        length = _next_part_length(sizes[len(result) :], owner_count - owner)
        result += [owner] * length
    return result + [owner_count - 1] * (len(sizes) - len(result))


def _next_part_length(sizes, owner_count):
    """Returns the number of items in the next owner's part; leaves at least one item for each later owner."""
    target = _fair_share(sizes, owner_count)
    total, length = sizes[0], 1
    while length <= len(sizes) - owner_count:
        size = sizes[length]
        if total + size > target:
            return length + 1 if total + size - target <= target - total else length
        total, length = total + size, length + 1
    return length


def _fair_share(sizes, owner_count):
    """Returns an equal share of the sizes for each owner.

    An item larger than all smaller items together gets a separate owner; the item and its owner do not count.
    """
    ascending = sorted(sizes)
    rest = sum(ascending)
    while owner_count > 1 and ascending[-1] > rest - ascending[-1]:
        rest -= ascending.pop()
        owner_count -= 1
    return rest // owner_count
