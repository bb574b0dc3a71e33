"""Under which conditions operators compute anything: the switches on the way to them that no merge has ended."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import tensorflow as tf

from npu_bridge.rewrite.loop_nodes import NotLoopableError

_NOTHING: frozenset = frozenset()


class Condition(NamedTuple):
    """One of the conditions of an operator.

    Attributes:
      predicate: name of a boolean scalar.
      side: the value it must have.
    """

    predicate: str
    side: bool


def find_conditions(ordered: Iterable[tf.Operation], fed: Collection[str]) -> dict[str, frozenset[Condition]]:
    """The conditions of some operators, by name; all of them must hold.

    Args:
      ordered: the operators, each after those it waits for; there is no loop among them.
      fed: names of tensors whose value is given with the run, and so is always there.
    Raises:
      NotLoopableError: a merge joins something other than the two sides of one condition.
    """
    found: dict[str, frozenset[Condition]] = {}
    for op in ordered:
        of_inputs = [conditions_of_tensor(tensor, found, fed) for tensor in op.inputs]
        of_controls = _NOTHING.union(*(found.get(other.name, _NOTHING) for other in op.control_inputs))
        of_data = _joined(op, of_inputs) if op.type in ("Merge", "RefMerge") else _NOTHING.union(*of_inputs)
        found[op.name] = of_data | of_controls
    return found


def conditions_of_tensor(
    tensor: tf.Tensor, found: Mapping[str, frozenset[Condition]], fed: Collection[str]
) -> frozenset[Condition]:
    """The conditions under which a tensor is there.

    Args:
      tensor: a tensor.
      found: the conditions of operators by name; the others have none.
      fed: names of tensors whose value is given with the run.
    """
    if tensor.name in fed:
        return _NOTHING
    conditions = found.get(tensor.op.name, _NOTHING)
    if tensor.op.type not in ("RefSwitch", "Switch"):
        return conditions
    return conditions | {Condition(_origin(tensor.op.inputs[1], fed).name, bool(tensor.value_index))}


def _origin(predicate, fed):
    """The tensor that a predicate is only another name of: conditions refer to theirs by a copy."""
    while predicate.op.type == "Identity" and predicate.name not in fed:
        predicate = predicate.op.inputs[0]
    return predicate


def _joined(merge, sides):
    if len(sides) == 2:
        ends = sides[0] ^ sides[1]
        if len(ends) == 2 and len({condition.predicate for condition in ends}) == 1:
            return sides[0] & sides[1]
    raise NotLoopableError({merge: f"{merge.name} joins more than the two sides of a condition"})
