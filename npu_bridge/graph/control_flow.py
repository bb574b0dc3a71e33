"""Finds the TF 1 loops and conditions around operators, from the operators alone; makes TensorFlow build such loops.

TensorFlow keeps control-flow contexts next to a graph; they are lost when the graph is imported from a GraphDef.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

import tensorflow as tf

from npu_bridge.graph.operators import NOTHING_FED, needed_ops

# How many loops, and how many conditions, an operator enters (+1) or leaves (-1).
_LOOPS = {"Enter": 1, "RefEnter": 1, "Exit": -1, "RefExit": -1}
_SWITCHES = ("Switch", "RefSwitch", "_SwitchN")
_OF_LOOP = " of a loop"
Guards = frozenset[tuple[str, int]]  # names of tensors that decide whether an operator runs, with the required values


@contextlib.contextmanager
def classic_control_flow() -> Iterator[None]:
    """Makes `tf.cond` and `while_loop` build switches and merges, as in TF 1, instead of one op with functions.

    A function cannot assign to TF 1 reference variables, and waits for all its inputs. With switches, every update
    waits only for the decision and for its own gradient.
    """
    was_on = tf.compat.v1.control_flow_v2_enabled()
    tf.compat.v1.disable_control_flow_v2()
    try:
        yield
    finally:
        if was_on:
            tf.compat.v1.enable_control_flow_v2()


class Depth(NamedTuple):
    """The depth of an operator in control flow: the numbers of `while` frames and of `cond` branches around it."""

    loops: int = 0
    conditions: int = 0


def measure_depths(
    ops: Collection[tf.Operation], fed_names: Collection[str] = NOTHING_FED
) -> dict[tf.Operation, Depth]:
    """Returns the depth of each operator in control flow; `ops` must be in the order of `computed_ops`.

    Each guard (`guards_of`) counts as a condition, and so does the choice that a switch makes. The switches of a loop
    count as one condition, which ends at the loop's exit.
    """
    found: dict[tf.Operation, Depth] = {}
    guards = guards_of(ops, fed_names)
    for op in ops:
        # An operator that is not found yet closes a loop.
        known = [found[other].loops for other in needed_ops(op, fed_names) if other in found]
        loops = max(known, default=0) + _LOOPS.get(op.type, 0)
        found[op] = Depth(max(loops, 0), len(guards[op]) + (op.type in _SWITCHES))
    return found


def group_by_depth(
    ops: Collection[tf.Operation], fed_names: Collection[str] = NOTHING_FED
) -> dict[Depth, list[tf.Operation]]:
    """Groups operators by their depth in control flow. The operators at `Depth()` always run, exactly once."""
    groups: dict[Depth, list[tf.Operation]] = {}
    for op, depth in measure_depths(ops, fed_names).items():
        groups.setdefault(depth, []).append(op)
    return groups


def guards_of(ops: Iterable[tf.Operation], fed_names: Collection[str]) -> dict[tf.Operation, Guards]:
    """Returns the guards of each operator: the tensors that decide whether it runs, with the required values.

    Guards are read from switches and merges. Control-flow contexts are not enough: an all-reduce outside of a branch
    can wait for an op inside it.
    """
    found: dict[tf.Operation, Guards] = {}
    for op in ops:
        known = [_guards_of_tensor(tensor, found) for tensor in op.inputs if tensor.name not in fed_names]
        known = [guards for guards in known if guards is not None]
        join = frozenset.intersection if op.type in ("Merge", "RefMerge") else frozenset.union
        guards = join(*known) if known else frozenset()
        guards = guards.union(*(found[other] for other in op.control_inputs if other in found))
        if op.type in ("Exit", "RefExit"):
            guards = frozenset(pair for pair in guards if not pair[0].endswith(_OF_LOOP))
        found[op] = guards
    return found


def _guards_of_tensor(tensor, guards_by_op):
    """Returns the guards under which a tensor exists; None if `guards_by_op` lacks the tensor's operator."""
    op = tensor.op
    if op not in guards_by_op or op.type not in _SWITCHES:
        return guards_by_op.get(op)
    predicate = op.inputs[1]
    name = predicate.name + (_OF_LOOP if predicate.op.type == "LoopCond" else "")
    return guards_by_op[op] | {(name, tensor.value_index)}
