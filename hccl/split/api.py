"""Sets how gradients are split into aggregation fragments.

A fragment is summed over the ranks in one all-reduce, which starts when its last gradient is ready. The split changes
when gradients are all-reduced, never their values. Set the split before `compute_gradients`, with the same values on
every rank. By default the first fragment holds 96.54 % of the bytes and the second fragment the rest.

The first split by index and the first split by size of a group stay until the group is destroyed; later calls are
ignored. A split by size overrides a split by index.
"""

from __future__ import annotations

from npu_bridge.base.arguments import is_integer, is_number
from npu_bridge.base.terminal import logger
from npu_bridge.collective import groups
from npu_bridge.collective.groups import WORLD

__all__ = ["set_split_strategy_by_idx", "set_split_strategy_by_size"]

_LOG = logger(__name__)
_LARGEST_INDEX = 4294967295
_DOCUMENTED_FRAGMENTS = 8
_TOLERANCE = 1e-6


def set_split_strategy_by_idx(idxList: list[int], group: str = WORLD) -> None:  # noqa: N803 - the documented name
    """Splits gradients by position in the order in which they become ready; this order is logged at INFO.

    Args:
      idxList: strictly ascending positions of the last gradient of each fragment; `[3, 9, 11]` splits 12 gradients into
        fragments of gradients 0..3, 4..9 and 10..11. Gradients after the last position are all-reduced one by one.
      group: the group whose gradients are split.
    Raises:
      ValueError: the group name is malformed, or `idxList` is not a list of strictly ascending positions. Only
        `compute_gradients`, which knows the gradients, raises for a position beyond the last gradient.
    Ranks: local; every rank must set the same values.
    """
    where = "hccl.set_split_strategy_by_idx"
    groups.check_group_name(group, where)
    _check_list(where, "idxList", idxList)
    if not all(is_integer(index) and 0 <= index <= _LARGEST_INDEX for index in idxList):
        raise _make_error(where, "idxList is not a list of positions", f"integers from 0 to {_LARGEST_INDEX}", idxList)
    if any(second <= first for first, second in zip(idxList, idxList[1:])):
        raise _make_error(where, "idxList does not ascend", "ascending positions", idxList)
    if not groups.groups_of_process().strategies.set_last_indices(group, list(map(int, idxList))):
        _warn_ignored(where, group, idxList)


def set_split_strategy_by_size(dataSizeList: list[int] | list[float], group: str = WORLD) -> None:  # noqa: N803 - the documented name
    """Splits gradients by shares of their total bytes.

    Args:
      dataSizeList: percentages, one for each fragment, summing to 100. Every fragment holds at least one gradient, and
        ends at the gradient that brings its size nearest to its percentage.
      group: the group whose gradients are split.
    Raises:
      ValueError: the group name is malformed, or `dataSizeList` is not a list of percentages summing to 100.
    Ranks: local; every rank must set the same values.
    """
    where = "hccl.set_split_strategy_by_size"
    groups.check_group_name(group, where)
    _check_list(where, "dataSizeList", dataSizeList)
    if not all(is_number(share) and share >= 0 for share in dataSizeList):
        raise _make_error(where, "dataSizeList is not a list of percentages", "numbers of at least 0", dataSizeList)
    if not abs(sum(dataSizeList) - 100) <= _TOLERANCE:
        raise _make_error(
            where, "the percentages do not make up the whole", "a sum of 100", f"{sum(dataSizeList):g}: {dataSizeList}"
        )
    if not groups.groups_of_process().strategies.set_percentages(group, list(map(float, dataSizeList))):
        _warn_ignored(where, group, dataSizeList)


def _check_list(function, name, values):
    if not isinstance(values, list) or not values:
        raise _make_error(function, f"{name} is not a list", "a list with at least one number", values)
    if len(values) > _DOCUMENTED_FRAGMENTS:
        _LOG.warning(
            "%s: %d fragments are more than the %d that the NPU stack allows. This package accepts them; use fewer if "
            "the script must also run on NPUs.",
            function,
            len(values),
            _DOCUMENTED_FRAGMENTS,
        )


def _warn_ignored(function, group, values):
    _LOG.warning(
        "%s: %s is ignored, because an earlier call has set the split of group %r, which stays until the group is "
        "destroyed. Remove one of the calls.",
        function,
        values,
        group,
    )


def _make_error(function, problem, expected, got):
    return ValueError(f"{function}: {problem}. Expected {expected}; got {got}. Correct the list.")
