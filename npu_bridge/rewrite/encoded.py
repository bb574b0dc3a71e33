"""Gradients that travel as something else: 16-bit numbers whose bits are moved and whose mean is taken in float32.

`collective/wire.py` builds these ops. What they do with numbers is known as a whole: of the numbers that arrive none is
larger than the largest one sent, and so none overflows.
"""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

# What keeps the bits.
_MOVES = ("DeepCopy", "Identity", "Bitcast")


class Way(NamedTuple):
    """From numbers to numbers.

    Attributes:
      entry: the op whose first input they are.
      end: the op whose first output they arrive in.
    """

    entry: tf.Operation
    end: tf.Operation


def way_of_swap(op: tf.Operation) -> Way | None:
    """Of a sum of bit patterns over two ranks, less this rank's own one: each gets what the other has."""
    entry = _where_numbers_enter(op)
    if entry is None or len(op.outputs) != 1:
        return None
    total = _only_user(op, "Bitcast")
    others = total and _only_user(total, "Sub")
    end = others and _only_user(others, "Bitcast")
    if end is None or others.inputs[0].name != total.outputs[0].name:
        return None
    own = _maker(others.inputs[1].op, "Bitcast")
    return _way(entry, end) if own is not None and own.inputs[0].name == entry.outputs[0].name else None


def way_of_join(op: tf.Operation) -> Way | None:
    """Of numbers joined as integers with the same bits."""
    if op.outputs[0].dtype.is_floating or len(op.outputs) != 1:
        return None
    entry, end = _where_numbers_enter(op), _only_user(op, "Bitcast")
    return _way(entry, end) if entry is not None and end is not None else None


def way_of_mean(op: tf.Operation) -> Way | None:
    """Of a mean that each rank takes of its part, before all parts are joined."""
    mean = _behind(op.inputs[0], _MOVES).op
    division = _maker(mean, "Cast") and _maker(mean.inputs[0].op, "RealDiv")
    total = division and _maker(division.inputs[0].op, "Sum")
    if total is None or not _divides_by_number_of_terms(division, total):
        return None
    wide = _behind(total.inputs[0], ("Reshape",)).op
    parts = _maker(wide, "Cast") and _behind(wide.inputs[0], (*_MOVES, "Reshape")).op
    exchange = parts and _maker(parts, "HorovodAlltoall")
    if exchange is None:
        return None
    entry = _where_numbers_enter(exchange)
    end = op if op.outputs[0].dtype.is_floating else _only_user(op, "Bitcast")
    return _way(entry, end) if entry is not None and end is not None else None


def _way(entry, end):
    return Way(entry, end) if entry.inputs[0].dtype == end.outputs[0].dtype else None


def _where_numbers_enter(op):
    """The op that turns floating-point numbers into the integers that `op` sends; None when they never were any."""
    while not op.inputs[0].dtype.is_floating:
        op = op.inputs[0].op
        if op.type not in _MOVES:
            return None
    return op


def _only_user(op, kind):
    users = op.outputs[0].consumers()
    return users[0] if len(users) == 1 and users[0].type == kind else None


def _behind(tensor, kinds):
    while tensor.op.type in kinds:
        tensor = tensor.op.inputs[0]
    return tensor


def _maker(op, kind):
    return op if op.type == kind else None


def _divides_by_number_of_terms(division, total):
    terms, axis = total.inputs[0].shape, tf.get_static_value(total.inputs[1])
    divisor = tf.get_static_value(division.inputs[1])
    return axis is not None and axis.size == 1 and terms.rank == 2 and divisor == terms[int(axis)]
