"""Splits gradients into fragments, in the order of the backward pass; a large fragment is sent in several all-reduces.

A fragment is a sequence of consecutive gradients in the order in which the backward pass computes them. The backward
pass hides the all-reduces of all fragments except the last one, so the split determines how much communication is
exposed. By default the last fragment holds 3.46 % of the bytes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

from npu_bridge.base import environment
from npu_bridge.base.arguments import is_integer
from npu_bridge.base.errors import message, shown

DEFAULT_PERCENTAGES = (96.54, 3.46)
_BYTES_PER_RANK = 4_000_000
# With overlapping steps, each piece that arrives lets a part of the next step begin.
_OVERLAPPED_BYTES_PER_RANK = 1_350_000
_CONCURRENT = 3


@dataclasses.dataclass(frozen=True)
class SplitStrategy:
    """The way to split the gradients of one group into fragments.

    `percentages` override `last_indices`, which override `first_parameters`. Without any of them, the default applies.

    Attributes:
      last_indices: position of each fragment's last gradient, in the order of the backward pass, or None.
      percentages: share of the bytes in each fragment, or None.
      first_parameters: positions of the parameters at which a fragment begins, in the order of the forward pass, or
        None.
    """

    last_indices: tuple | None = None
    percentages: tuple | None = None
    first_parameters: tuple | None = None

    def can_split(self, gradient_count: int) -> bool:
        """Returns whether `gradient_count` gradients can be split in this way."""
        return self.percentages is not None or self.last_indices is None or self.last_indices[-1] < gradient_count

    def split(self, sizes_bytes: Sequence[int]) -> list[list[int]]:
        """Returns positions in `sizes_bytes`, one list per fragment. Errors are as in `split_by_index`."""
        if not sizes_bytes:
            return []
        if self.percentages is None and self.last_indices is not None:
            return split_by_index(len(sizes_bytes), self.last_indices)
        if self.percentages is None and self.first_parameters is not None:
            return split_at_parameters(len(sizes_bytes), self.first_parameters)
        return split_by_size(sizes_bytes, self.percentages or DEFAULT_PERCENTAGES)


class SplitStrategies:
    """The split strategies of groups, by name. The first setting of each kind stays until the group is destroyed."""

    def __init__(self):
        self._by_group: dict[str, SplitStrategy] = {}

    def strategy_of(self, group: str) -> SplitStrategy:
        """Returns the strategy of a group; the default strategy if none was set."""
        return self._by_group.get(group) or SplitStrategy()

    def set_last_indices(self, group: str, last_indices: Sequence[int]) -> bool:
        """Sets the last gradients of a group's fragments; returns False if the group keeps an earlier setting."""
        return self._set_strategy(group, "last_indices", last_indices)

    def set_percentages(self, group: str, percentages: Sequence[float]) -> bool:
        """Sets the sizes of a group's fragments; returns False if the group keeps an earlier setting."""
        return self._set_strategy(group, "percentages", percentages)

    def reset(self, group: str) -> None:
        """Resets a group to the default strategy."""
        self._by_group.pop(group, None)

    def _set_strategy(self, group, kind, numbers):
        strategy = self.strategy_of(group)
        if getattr(strategy, kind) is not None:
            return False
        self._by_group[group] = dataclasses.replace(strategy, **{kind: tuple(numbers)})
        return True


def check_first_parameters(owner: str, first_parameters: Any) -> tuple | None:
    """Checks the option `gradient_split_groups`: the positions of parameters at which fragments begin, or None.

    Returns:
      The positions as a tuple, or None.
    Raises:
      TypeError: the option is not a list.
      ValueError: the positions do not ascend, or one is below 1.
    """
    if first_parameters is None:
        return None
    is_list = isinstance(first_parameters, (list, tuple))
    if not is_list or not are_ascending_positions(first_parameters):
        problem, expected = "gradient_split_groups cannot be used", "a list of ascending positions of at least 1"
        fix = "Count parameters from 1, in the order of the forward pass, or leave it out."
        kind = ValueError if is_list else TypeError
        raise kind(message(owner, problem, expected, shown(first_parameters), fix))
    return tuple(map(int, first_parameters))


def are_ascending_positions(positions: Sequence[Any]) -> bool:
    """Returns whether positions are strictly ascending whole numbers above 0; False if there are no positions."""
    are_whole = all(is_integer(position) and position >= 1 for position in positions)
    return bool(positions) and are_whole and all(low < high for low, high in zip(positions, positions[1:]))


def split_by_index(count: int, last_indices: Sequence[int]) -> list[list[int]]:
    """Splits gradients into fragments that end at given positions.

    Gradients after the last position are all-reduced one by one.

    Args:
      count: number of gradients.
      last_indices: strictly ascending positions, each of a fragment's last gradient.
    Returns:
      Positions of gradients, one list per fragment; together they are 0..count-1 in order.
    Raises:
      ValueError: a position is beyond the last gradient.
    Example: split_by_index(12, [3, 9, 11]) gives 0..3, 4..9 and 10..11.
    """
    if last_indices[-1] >= count:
        raise ValueError(
            f"hccl.set_split_strategy_by_idx: the list reaches beyond the gradients. Expected indices up to "
            f"{count - 1}, because {count} dense gradients are all-reduced; got {last_indices[-1]}. End the list with "
            f"{count - 1}."
        )
    starts = [0, *(last + 1 for last in last_indices)]
    fragments = [list(range(start, end)) for start, end in zip(starts, starts[1:])]
    return fragments + [[position] for position in range(starts[-1], count)]


def split_at_parameters(count: int, first_parameters: Sequence[int]) -> list[list[int]]:
    """Splits gradients into fragments that begin at given parameters.

    The gradient of the last parameter becomes ready first, so the fragment of the last parameters comes first.

    Args:
      count: number of gradients.
      first_parameters: strictly ascending positions, from 1, in the order of the forward pass; positions beyond the
        last parameter have no effect.
    Returns:
      Positions in the order in which gradients become ready, one list per fragment; together 0..count-1 in order.
    Example: split_at_parameters(5, [2]) gives [[0, 1, 2], [3, 4]].
    """
    starts = [0, *(count - first for first in reversed(first_parameters) if first < count), count]
    return [list(range(start, end)) for start, end in zip(starts, starts[1:])]


def split_by_size(sizes_bytes: Sequence[int], percentages: Sequence[float] = DEFAULT_PERCENTAGES) -> list[list[int]]:
    """Splits gradients into fragments that hold given shares of the bytes.

    Each fragment except the last ends at the gradient where the total of all bytes so far is nearest to the total of
    the percentages so far. On a tie it ends at the earlier gradient. Every fragment has at least one gradient, and the
    last fragment takes the rest. If no gradients are left, there are fewer fragments.

    Args:
      sizes_bytes: bytes of each gradient, in the order they become ready.
      percentages: share of each fragment; they sum to 100.
    Returns:
      Positions in `sizes_bytes`, one list per fragment; together 0..n-1 in order.
    Example: split_by_size([10, 20, 30, 25, 15], [50, 50]) gives [[0, 1, 2], [3, 4]].
    """
    totals = list(itertools.accumulate(sizes_bytes, initial=0))
    fragments: list[list[int]] = []
    start, target = 0, 0.0
    for percentage in percentages[:-1]:
        if start == len(sizes_bytes):
            break
        target += totals[-1] * percentage / 100.0
        end = min((abs(totals[end] - target), end) for end in range(start + 1, len(sizes_bytes) + 1))[1]
        fragments.append(list(range(start, end)))
        start = end
    if start < len(sizes_bytes):
        fragments.append(list(range(start, len(sizes_bytes))))
    return fragments


def all_reduce_bytes(world_size: int, overlaps_next_step: bool = False) -> int:
    """Returns the largest number of bytes in one all-reduce; `FUSION_TENSOR_SIZE` overrides this default.

    The number grows with the number of ranks, because a ring of n ranks splits the bytes into n parts.

    Args:
      overlaps_next_step: whether the next step can begin while gradients are all-reduced. Smaller all-reduces
        are better then.
    Raises:
      ValueError: the variable is not a positive whole number.
    """
    bytes_per_rank = _OVERLAPPED_BYTES_PER_RANK if overlaps_next_step else _BYTES_PER_RANK
    return environment.read_positive_number("FUSION_TENSOR_SIZE", bytes_per_rank * world_size, "bytes")


def max_concurrent_all_reduces(default: int = _CONCURRENT) -> int:
    """Returns how many all-reduces of gradients can run at once: `NPU_TRANSFERS_IN_FLIGHT` if set, else `default`.

    A small and urgent collective, such as the decision about the step, waits only for the running all-reduces. If only
    one ran, the network would be idle while the next all-reduce is prepared.

    Raises:
      ValueError: the variable is not a positive whole number.
    """
    return environment.read_positive_number("NPU_TRANSFERS_IN_FLIGHT", default, "transfers")


def split_large_fragments(
    fragments: Sequence[Sequence[int]], sizes_bytes: Sequence[int], world_size: int, overlaps: bool = False
) -> list[list[int]]:
    """Splits large fragments into parts of up to `all_reduce_bytes`; each part is one all-reduce.

    Fragments and parts are lists of positions in `sizes_bytes`, in the same order. A single gradient is never split.
    """
    parts: list[list[int]] = []
    largest = all_reduce_bytes(world_size, overlaps)
    for fragment in fragments:
        carried = math.inf  # a fragment begins a new part
        for position in fragment:
            if carried + sizes_bytes[position] > largest:
                parts.append([])
                carried = 0
            parts[-1].append(position)
            carried += sizes_bytes[position]
    return parts


def lossless_prescale(world_size: float) -> float:
    """Returns the largest power of two not above 1 / world_size.

    Multiplying by this power loses no bits, and the sum of `world_size` finite values scaled by it is finite.
    """
    return 2.0 ** -math.ceil(math.log2(world_size))
