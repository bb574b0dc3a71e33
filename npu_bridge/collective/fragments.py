"""Cuts gradients into fragments, in the order of the backward pass; each fragment is one all-reduce.

A fragment is a run of gradients, in the order in which the backward pass computes them, that is summed over the ranks
in one all-reduce. The rest of the backward pass hides all fragments but the last, so the cut decides how much is
exposed. By default the last fragment holds 3.46 % of the bytes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

from npu_bridge.base import environment
from npu_bridge.base.errors import message, shown

DEFAULT_PERCENTAGES = (96.54, 3.46)
_FLIGHT_BYTES_PER_RANK = 4_000_000
# With overlapping steps, each piece that arrives lets a part of the next step begin.
_OVERLAPPED_BYTES_PER_RANK = 1_350_000
_IN_FLIGHT = 3


@dataclasses.dataclass(frozen=True)
class SplitStrategy:
    """The way in which the gradients of one group are cut.

    Percentages of bytes override positions of last gradients, these override positions of parameters, and all override
    the default.

    Attributes:
      last_indices: position of each fragment's last gradient, in readiness order, or None.
      percentages: share of the bytes of each fragment, or None.
      first_parameters: positions of the parameters at which a fragment begins, in the order of the forward pass, or
        None.
    """

    last_indices: tuple | None = None
    percentages: tuple | None = None
    first_parameters: tuple | None = None

    def fits(self, count: int) -> bool:
        """Returns whether `count` gradients can be cut."""
        return self.percentages is not None or self.last_indices is None or self.last_indices[-1] < count

    def cut(self, sizes_bytes: Sequence[int]) -> list[list[int]]:
        """Returns positions in `sizes_bytes`, one list per fragment; errors as `cut_by_index`."""
        if not sizes_bytes:
            return []
        if self.percentages is None and self.last_indices is not None:
            return cut_by_index(len(sizes_bytes), self.last_indices)
        if self.percentages is None and self.first_parameters is not None:
            return cut_at_parameters(len(sizes_bytes), self.first_parameters)
        return cut_by_size(sizes_bytes, self.percentages or DEFAULT_PERCENTAGES)


class SplitStrategies:
    """The strategies that were set, by group name. The first setting of a kind wins until the group is destroyed."""

    def __init__(self):
        self._by_group: dict[str, SplitStrategy] = {}

    def of(self, group: str) -> SplitStrategy:
        """Returns the strategy of a group; the default one when none was set."""
        return self._by_group.get(group) or SplitStrategy()

    def set_last_indices(self, group: str, last_indices: Sequence[int]) -> bool:
        """Sets the cut by index; returns False when an earlier setting stays."""
        return self._set(group, "last_indices", last_indices)

    def set_percentages(self, group: str, percentages: Sequence[float]) -> bool:
        """Sets the cut by size; returns False when an earlier setting stays."""
        return self._set(group, "percentages", percentages)

    def forget(self, group: str) -> None:
        """Resets a group to the default."""
        self._by_group.pop(group, None)

    def _set(self, group, kind, numbers):
        strategy = self.of(group)
        if getattr(strategy, kind) is not None:
            return False
        self._by_group[group] = dataclasses.replace(strategy, **{kind: tuple(numbers)})
        return True


def check_first_parameters(owner: str, first_parameters: Any) -> tuple | None:
    """Returns the positions at which an optimizer's fragments begin, its `gradient_split_groups`; None without them.

    Raises:
      TypeError: they are not a list.
      ValueError: they are not ascending positions of at least 1.
    """
    if first_parameters is None:
        return None
    is_list = isinstance(first_parameters, (list, tuple))
    if not is_list or not are_ascending_positions(first_parameters):
        problem, expected = "gradient_split_groups is wrong", "a list of ascending positions of at least 1"
        fix = "Count parameters from 1, in the order of the forward pass, or leave it out."
        kind = ValueError if is_list else TypeError
        raise kind(message(owner, problem, expected, shown(first_parameters), fix))
    return tuple(first_parameters)


def are_ascending_positions(positions: Sequence[Any]) -> bool:
    """Returns True for at least one whole number, all at least 1 and strictly ascending."""
    are_whole = all(type(position) is int and position >= 1 for position in positions)
    return bool(positions) and are_whole and all(low < high for low, high in zip(positions, positions[1:]))


def cut_by_index(count: int, last_indices: Sequence[int]) -> list[list[int]]:
    """Cuts gradients into fragments that end at given positions.

    Gradients after the last position are all-reduced one by one.

    Args:
      count: number of gradients.
      last_indices: strictly ascending positions, each of a fragment's last gradient.
    Returns:
      Positions, one list per fragment, together 0..count-1 in order.
    Raises:
      ValueError: a position is beyond the last gradient.
    Example: cut_by_index(12, [3, 9, 11]) gives 0..3, 4..9 and 10..11.
    """
    if last_indices[-1] >= count:
        raise ValueError(
            f"hccl.set_split_strategy_by_idx: the list reaches beyond the gradients. Expected indices up to "
            f"{count - 1}, because {count} dense gradients are reduced; got {last_indices[-1]}. End the list with "
            f"{count - 1}."
        )
    starts = [0, *(last + 1 for last in last_indices)]
    fragments = [list(range(start, end)) for start, end in zip(starts, starts[1:])]
    return fragments + [[position] for position in range(starts[-1], count)]


def cut_at_parameters(count: int, first_parameters: Sequence[int]) -> list[list[int]]:
    """Cuts gradients into fragments that begin at given parameters.

    Gradients become ready last parameter first, so the fragment of the last parameters comes first.

    Args:
      count: number of gradients.
      first_parameters: strictly ascending positions, from 1, in the order of the forward pass; those beyond the last
        parameter cut nothing.
    Returns:
      Positions in the order in which gradients become ready, one list per fragment, together 0..count-1 in order.
    Example: cut_at_parameters(5, [2]) gives [[0, 1, 2], [3, 4]].
    """
    starts = [0, *(count - first for first in reversed(first_parameters) if first < count), count]
    return [list(range(start, end)) for start, end in zip(starts, starts[1:])]


def cut_by_size(sizes_bytes: Sequence[int], percentages: Sequence[float] = DEFAULT_PERCENTAGES) -> list[list[int]]:
    """Cuts gradients into fragments that hold given shares of the bytes.

    Each fragment but the last ends at the gradient whose running total is nearest to its share, after correcting for
    the previous fragment's excess or shortfall. On a tie the earlier gradient ends it, and every fragment holds at
    least one gradient. The last fragment takes the rest; when gradients run out, there are fewer fragments.

    Args:
      sizes_bytes: bytes of each gradient, in the order they become ready.
      percentages: share of each fragment, summing to 100.
    Returns:
      Positions in `sizes_bytes`, one list per fragment, together 0..n-1 in order.
    Example: cut_by_size([10, 20, 30, 25, 15], [50, 50]) gives [[0, 1, 2], [3, 4]].
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


def flight_bytes(world_size: int, overlaps: bool = False) -> int:
    """Returns the bytes of one all-reduce: more on more ranks, because a ring of n ranks cuts them into n parts.

    `FUSION_TENSOR_SIZE` sets another number of bytes.

    Args:
      overlaps: the next step can begin while gradients are all-reduced, for which smaller pieces are better.
    Raises:
      ValueError: the variable is not such a number.
    """
    bytes_per_rank = _OVERLAPPED_BYTES_PER_RANK if overlaps else _FLIGHT_BYTES_PER_RANK
    return environment.positive_number("FUSION_TENSOR_SIZE", bytes_per_rank * world_size, "bytes")


def most_in_flight(default: int = _IN_FLIGHT) -> int:
    """Returns how many all-reduces of gradients can run at once; `NPU_TRANSFERS_IN_FLIGHT` sets another number.

    A small and urgent collective, such as the decision about the step, waits only for these. Arrived gradients can be
    used meanwhile. With only one, the network is idle while the next one is prepared.

    Raises:
      ValueError: the variable is not such a number.
    """
    return environment.positive_number("NPU_TRANSFERS_IN_FLIGHT", default, "transfers")


def cut_for_flight(
    cut: Sequence[Sequence[int]], sizes_bytes: Sequence[int], world_size: int, overlaps: bool = False
) -> list[list[int]]:
    """Cuts large fragments into runs of up to `flight_bytes`; each run is one all-reduce.

    Fragments and runs are positions in `sizes_bytes`, in the same order; a single gradient is never cut, however large.
    """
    flights: list[list[int]] = []
    largest = flight_bytes(world_size, overlaps)
    for fragment in cut:
        carried = math.inf  # a fragment starts a new run
        for position in fragment:
            if carried + sizes_bytes[position] > largest:
                flights.append([])
                carried = 0
            flights[-1].append(position)
            carried += sizes_bytes[position]
    return flights


def lossless_prescale(world_size: float) -> float:
    """Returns the largest power of two not above 1 / world_size.

    Multiplying by it loses no bits, and the sum of `world_size` so scaled finite values is finite.
    """
    return 2.0 ** -math.ceil(math.log2(world_size))
