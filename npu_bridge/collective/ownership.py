"""Divides variables among ranks so that each updates about as many bytes."""

from __future__ import annotations

from collections.abc import Sequence

from npu_bridge.base.errors import message


def fair_division(sizes_bytes: Sequence[int], owners: int) -> list[int]:
    """Divides a list into one run of neighbours for each owner, with about as many bytes each.

    Each owner aims at an equal share of the rest. An item larger than all other remaining items together will fill an
    owner alone, and does not raise the aim of the others. A run always takes its first item, continues within its aim,
    and takes one more item if the excess is no larger than the shortfall would be.

    Args:
      sizes_bytes: size of each item; can be 0.
      owners: number of owners, at least 1.
    Returns:
      The owner of each item: ascending from 0, and every owner has at least one item.
    Raises:
      ValueError: there are fewer items than owners.
    Example: fair_division([40, 30, 20, 10], 2) gives [0, 1, 1, 1].
    """
    if owners > len(sizes_bytes):
        raise ValueError(
            message(
                "fair_division",
                "there is not one gradient for each rank",
                f"at least {owners} gradients for {owners} ranks",
                str(len(sizes_bytes)),
                "Use fewer ranks, or is_weight_update_sharding=False.",
            )
        )
    result: list[int] = []
    for owner in range(owners - 1):
        length = _run_length(sizes_bytes[len(result) :], owners - owner)
        result += [owner] * length
    return result + [owners - 1] * (len(sizes_bytes) - len(result))


def _run_length(sizes, owners):
    """Returns how many of the first items the next owner gets; each of the other owners keeps at least one."""
    target = _fair_share(sizes, owners)
    total, length = sizes[0], 1
    while length <= len(sizes) - owners:
        size = sizes[length]
        if total + size > target:
            return length + 1 if total + size - target <= target - total else length
        total, length = total + size, length + 1
    return length


def _fair_share(sizes, owners):
    """Returns an equal share of the items, without those that are larger than all smaller ones together."""
    ascending = sorted(sizes)
    rest = sum(ascending)
    while owners > 1 and ascending[-1] > rest - ascending[-1]:
        rest -= ascending.pop()
        owners -= 1
    return rest // owners
