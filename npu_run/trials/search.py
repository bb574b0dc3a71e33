"""Finds the smallest set of operators that must keep their dtype for a training to keep its results.

The search needs no TensorFlow: it calls a function that tells whether a training passes if a set of operators keeps its
dtype and all other operators are lowered. The search assumes that a training never gets worse if more operators keep
their dtype. Even if this assumption is wrong, a training with the returned set has passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Callable, NamedTuple


class Operator(NamedTuple):
    """An operator that can be lowered.

    Attributes:
      name: the name with its scopes, such as "layer_1/attention/Softmax".
      type: the operator type, such as "Softmax".
      where: the script line that made the operator; "" if unknown.
    """

    name: str
    type: str
    where: str = ""

    @property
    def scope(self) -> str:
        """The name scope: the name without its last part."""
        return self.name.rpartition("/")[0]


class SearchResult(NamedTuple):
    """The result of a search.

    Attributes:
      kept: the operators that keep their dtype, in the given order.
      is_smallest: whether every kept operator is needed; False if the allowed number of runs ended the search.
    """

    kept: tuple[Operator, ...]
    is_smallest: bool


class OutOfRunsError(Exception):
    """Raised if a further run would exceed the allowed number of runs."""


# From coarse to fine: name scopes, operator types in a scope, single operators.
_LEVELS: tuple[Callable[[Operator], object], ...] = (
    lambda operator: operator.name.split("/")[0],
    lambda operator: operator.scope,
    lambda operator: (operator.scope, operator.type),
    lambda operator: operator.name,
)


def find_minimal_float32_set(
    operators: Sequence[Operator], is_accepted: Callable[[frozenset[str]], bool]
) -> SearchResult | None:
    """Finds a set of operators that must keep their dtype, from which no operator can be left out.

    With n operators of which k are needed, `is_accepted` is called about k * log2(n) + 4 * (k + 1) times.

    Args:
      operators: all operators that can be lowered.
      is_accepted: returns whether a training passes if the operators with these names keep their dtype. If it raises
        `OutOfRunsError`, the search returns the smallest set that has passed.
    Returns:
      The set, empty if all operators can be lowered; None if a training fails even when all operators keep their dtype.
    """
    asked: dict[frozenset[str], bool] = {}
    best = list(operators)
    is_smallest = True

    def is_accepted_with(kept: Sequence[Operator]) -> bool:
        nonlocal best
        names = frozenset(operator.name for operator in kept)
        if names not in asked:
            asked[names] = is_accepted(names)
        if asked[names] and len(names) < len(best):
            best = list(kept)
        return asked[names]

    try:
        if is_accepted_with([]):
            return SearchResult((), True)
        if not is_accepted_with(operators):
            return None
        left = list(operators)
        for level in _LEVELS:
            groups: dict[object, list[Operator]] = {}
            for operator in left:
                groups.setdefault(level(operator), []).append(operator)
            left = _find_needed_operators(list(groups.values()), is_accepted_with)
    except OutOfRunsError:
        is_smallest = False
    kept = {operator.name for operator in best}
    return SearchResult(tuple(operator for operator in operators if operator.name in kept), is_smallest)


def _find_needed_operators(
    groups: list[list[Operator]], are_operators_sufficient: Callable[[Sequence[Operator]], bool]
) -> list[Operator]:
    """Returns the operators of the needed groups.

    All groups together are known to pass, and an empty set is known to fail. The shortest passing prefix of the list
    ends with a needed group. The groups before the needed group are then searched again, with that group kept.
    """
    needed: list[Operator] = []

    def add_first_groups(count: int) -> list[Operator]:
        return [*needed, *(operator for group in groups[:count] for operator in group)]

    while groups:
        if len(groups) > 1 or needed:
            if are_operators_sufficient(needed):
                return needed
        fails, succeeds = 0, len(groups)
        while succeeds - fails > 1:
            middle = (fails + succeeds) // 2
            if are_operators_sufficient(add_first_groups(middle)):
                succeeds = middle
            else:
                fails = middle
        needed = [*needed, *groups[succeeds - 1]]
        groups = groups[: succeeds - 1]
    return needed
