"""Finds variables that a run reads and writes in no fixed order, so that repeated runs can give different results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from npu_bridge.graph.operators import consumers, needed_ops
from npu_bridge.graph.run import SessionRun
from npu_bridge.graph.variables import VARIABLE_TYPES, changes_variable, variable_behind

_ALIASES = ("Identity", "RefIdentity")  # they pass on the buffer of a reference, which later operators read


class Race(NamedTuple):
    """Operators that use one variable in no fixed order.

    Attributes:
      writer: name of an operator that writes the variable.
      others: names of the operators that can read or write the variable at the same time.
    """

    writer: str
    others: list[str]


def find_races(run: SessionRun) -> dict[str, Race]:
    """Returns the races of a run, by variable name. Operators that only observe, as summaries do, are ignored."""
    ops = run.ops
    writers: dict[str, list[tf.Operation]] = {}
    readers: dict[str, list[tf.Operation]] = {}
    computed = set(ops)
    for op in ops:
        for name, is_written in _variable_uses(op):
            if is_written:
                writers.setdefault(name, []).append(op)
            else:
                readers.setdefault(name, []).extend(other for other in _readers_behind_aliases(op) if other in computed)
    watched = dict.fromkeys(op for name in writers for op in (*writers[name], *readers.get(name, ())))
    all_writers = [op for ops_of_name in writers.values() for op in ops_of_name]
    matters = _ops_needed_by(ops, all_writers if run.loss is None else [*all_writers, run.loss.op])
    bits = {op: 1 << number for number, op in enumerate(watched)}
    before = _watched_ops_before(ops, bits)
    found: dict[str, Race] = {}
    for name, writing in writers.items():
        for writer in writing:
            others = [op for op in (*writing, *readers.get(name, ())) if op is not writer and op in matters]
            apart = [op for op in others if not (before[writer] & bits[op] or before[op] & bits[writer])]
            if apart:
                found.setdefault(name, Race(writer.name, [op.name for op in dict.fromkeys(apart)]))
    return found


def _variable_uses(op: tf.Operation) -> list[tuple[str, bool]]:
    """Returns the variables among the inputs of `op`, each with whether `op` writes it."""
    if op.type in VARIABLE_TYPES or op.type == "IsVariableInitialized" or op.type == "VarIsInitializedOp":
        return []
    writes, arguments = changes_variable(op.type), op.op_def.input_arg
    found = []
    for position, tensor in enumerate(op.inputs):
        name = variable_behind(tensor)
        if name is not None and op.type not in ("Enter", "RefEnter", "Switch", "RefSwitch"):
            is_handle = tensor.dtype == tf.resource or (position < len(arguments) and arguments[position].is_ref)
            found.append((name, writes and is_handle))
    return found


def _readers_behind_aliases(op: tf.Operation) -> list[tf.Operation]:
    is_alias = op.type in _ALIASES and op.inputs[0].dtype != tf.resource
    return [reader for user in consumers(op) for reader in _readers_behind_aliases(user)] if is_alias else [op]


def _ops_needed_by(all_ops: Sequence[tf.Operation], results: Sequence[tf.Operation]) -> set[tf.Operation]:
    needed = set(results)
    for op in reversed(all_ops):
        if op in needed:
            needed.update(needed_ops(op))
    return needed


def _watched_ops_before(ops: Sequence[tf.Operation], bits: dict[tf.Operation, int]) -> dict[tf.Operation, int]:
    """Returns, for every operator, the sum of the bits of the watched operators that always run before it."""
    before: dict[tf.Operation, int] = {}
    for op in ops:
        known = 0
        for other in needed_ops(op):
            known |= before.get(other, 0) | bits.get(other, 0)
        before[op] = known
    return before
