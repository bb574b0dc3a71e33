"""Implements `dump_config` with `enable_dump_debug`: finds the operator that made the first NaN or Inf of a step."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from npu_bridge.base.files import new_file
from npu_bridge.base.machine import own_packages
from npu_bridge.base.terminal import logger
from npu_bridge.graph.run import Run
from npu_bridge.options import TrainingOptions
from npu_bridge.session.dump_files import with_savable_dtype
from npu_bridge.session.precision import rounding
from npu_bridge.session.tensor_watch import TensorWatch, find_places

_LOG = logger(__name__)
# The number of steps to report (ours): once a variable is NaN, every later step has one too.
MOST_REPORTS = 20


class Finding(NamedTuple):
    """The origin of the non-finite values of a step.

    Attributes:
      origin: the operator that made the first one from finite inputs, or whose output was fed with one.
      spoilt: names of all operators with such values, in the order they ran.
    """

    origin: object
    spoilt: list


class OverflowHook(TensorWatch):
    """Searches every step for NaN and Inf, names the operator that made the first, and writes its tensors.

    This operator is the earliest one with finite inputs, in an order in which every operator comes after those it
    needs; constants are never named. Its inputs and outputs are written like a dump, with an `overflow.json`.
    The search ends after 20 such steps. It fetches all numbers of a step: expect it to be slow.

    Ranks: local; each looks at its own numbers.
    """

    def __init__(self, options: TrainingOptions, graph_name: str | None = None):
        super().__init__(options, graph_name)
        self._reports = 0

    def names_to_fetch(self, run: Run, step: int) -> list:
        """Returns the names of all numeric tensors of the run."""
        return sorted(run.values)

    def handle_values(self, run: Run, step: int, values: dict) -> None:
        """Reports the origin of non-finite values in one step."""
        finding = find_origin(run.ops, run.fed, values)
        if finding is None:
            return
        self._report(run, step, finding, values)
        self._reports += 1
        if self._reports == MOST_REPORTS:
            self.stop()
            _LOG.warning("enable_dump_debug: %d steps had NaN or Inf; no further step is examined.", MOST_REPORTS)

    def _report(self, run, step, finding, values):
        op, name = finding.origin, self.name_of(run)
        folder = self.write(run, step, find_places([op], ("input", "output"), values), values)
        about = {"op": op.name, "type": op.type, "made_at": _place_in_script(op), "graph": name, "step": step}
        with new_file(os.path.join(folder, "overflow.json")) as file:
            json.dump({**about, "operators_with_nan_or_inf": finding.spoilt}, file, indent=1)
        _LOG.warning(
            "enable_dump_debug: rank %d, step %d of %s: the first NaN or Inf comes from %s; %d operators have one. "
            "Its tensors are in %s.",
            self._rank,
            step,
            name,
            describe(op),
            len(finding.spoilt),
            folder,
        )


def find_origin(ops: Sequence[tf.Operation], fed: Iterable[tf.Tensor], values: dict) -> Finding | None:
    """Returns the operator that made the first NaN or Inf of a step; None when every number is finite.

    If Inf is an input, as in a mask, it can be that no operator made one from finite inputs. Then the origin is
    the first operator that made NaN from inputs without NaN.

    Args:
      ops: the operators of the run, every one after those it needs.
      fed: the tensors that were fed.
      values: numpy arrays by tensor name.
    """
    state = {name: _worst(value) for name, value in values.items()}
    spoilt = [op for op in ops if op.type != "Const" and _worst_of(op.outputs, state)]
    for tensor in fed:
        if _worst_of([tensor], state):
            return Finding(tensor.op, [tensor.op.name, *(op.name for op in spoilt)])
    for op in spoilt:
        if not _worst_of(op.inputs, state):
            return Finding(op, [other.name for other in spoilt])
    for op in spoilt:
        if _worst_of(op.outputs, state) == _NAN and _worst_of(op.inputs, state) != _NAN:
            return Finding(op, [other.name for other in spoilt])
    return None


_FINITE, _INF, _NAN = range(3)


def _worst(value):
    number = with_savable_dtype(value)
    if number.dtype.kind not in "fc" or np.isfinite(number).all():
        return _FINITE
    return _NAN if np.isnan(number).any() else _INF


def _worst_of(tensors, state):
    return max((state.get(tensor.name, _FINITE) for tensor in tensors), default=_FINITE)


def describe(op: tf.Operation) -> str:
    """Returns type, name and line of an operator, or of the one whose values it rounds."""
    computing = rounding.operator_behind(op)
    place = _place_in_script(computing)
    rounded = ", of values rounded to 16 bits" if computing is not op else ""
    return f"{computing.type} {computing.name!r}{rounded}{f', made at {place}' if place else ''}"


def _place_in_script(op) -> str:
    """Returns file and line of the script that made an operator; empty when TensorFlow kept no record."""
    installed = os.path.dirname(os.path.dirname(tf.__file__))
    for frame in reversed(op.traceback or ()):
        if not frame.filename.startswith((installed, *own_packages())):
            return f"{frame.filename}:{frame.lineno}"
    return ""
