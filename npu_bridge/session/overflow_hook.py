"""Implements `dump_config` with `enable_dump_debug`: finds the operator that made the first NaN or Inf of a step."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from npu_bridge.base.files import new_file
from npu_bridge.base.machine import project_package_folders
from npu_bridge.base.terminal import logger
from npu_bridge.graph.run import SessionRun
from npu_bridge.options import TrainingOptions
from npu_bridge.session.dump_files import convert_to_savable_dtype
from npu_bridge.session.precision import rounding
from npu_bridge.session.tensor_watch import TensorWatch, find_tensor_places

_LOG = logger(__name__)
# The number of steps to report: once a variable is NaN, every later step has one too.
MOST_REPORTS = 20


class NonFiniteOrigin(NamedTuple):
    """The operator at which the non-finite values of a step begin, and the operators that have such values.

    Attributes:
      origin: the operator that made the first NaN or Inf from finite inputs, or whose output was fed with NaN or Inf.
      non_finite_ops: names of all operators with NaN or Inf, in the order in which they can be computed.
    """

    origin: object
    non_finite_ops: list


class OverflowHook(TensorWatch):
    """A hook that names the operator that made the first NaN or Inf of a step, and writes the operator's tensors.

    This operator is the earliest with finite inputs and a non-finite output, in an order in which every operator comes
    after its inputs; constants are never named. Its inputs and outputs are written like a dump, with an
    `overflow.json`. The search ends after 20 steps with NaN or Inf. The hook fetches all numbers of a step, which is
    slow.

    Ranks: local; each rank searches its own numbers.
    """

    def __init__(self, options: TrainingOptions, graph_name: str | None = None):
        super().__init__(options, graph_name)
        self._reports = 0

    def names_to_fetch(self, run: SessionRun, step: int) -> list:
        """Returns the names of all numeric tensors of the run."""
        return sorted(run.values)

    def handle_fetched_values(self, run: SessionRun, step: int, values: dict) -> None:
        """Reports the operator at which the non-finite values of a step begin."""
        finding = find_first_non_finite(run.ops, run.fed, values)
        if finding is None:
            return
        self._report(run, step, finding, values)
        self._reports += 1
        if self._reports == MOST_REPORTS:
            self.stop()
            _LOG.warning("enable_dump_debug: %d steps had NaN or Inf; no further step is examined.", MOST_REPORTS)

    def _report(self, run, step, finding, values):
        op, name = finding.origin, self.graph_name_of(run)
        folder = self.write_tensors_of_step(run, step, find_tensor_places([op], ("input", "output"), values), values)
        place = _script_line(rounding.operator_rounded_by(op))
        about = {"op": op.name, "type": op.type, "made_at": place, "graph": name, "step": step}
        with new_file(os.path.join(folder, "overflow.json")) as file:
            json.dump({**about, "operators_with_nan_or_inf": finding.non_finite_ops}, file, indent=1)
        _LOG.warning(
            "enable_dump_debug: rank %d, step %d of %s: the first NaN or Inf comes from %s; %d operators have NaN or "
            "Inf. The tensors of the first operator are in %s.",
            self._rank,
            step,
            name,
            describe_operator(op),
            len(finding.non_finite_ops),
            folder,
        )


def find_first_non_finite(
    ops: Sequence[tf.Operation], fed: Iterable[tf.Tensor], values: dict
) -> NonFiniteOrigin | None:
    """Returns the operator that made the first NaN or Inf of a step; None when every number is finite.

    If a constant or variable holds Inf, as a mask can, it is possible that no operator made NaN or Inf from finite
    inputs. Then the first operator that made NaN from inputs without NaN is returned.

    Args:
      ops: the operators of the run; each comes after its inputs.
      fed: the tensors that were fed.
      values: numpy arrays by tensor name.
    """
    state = {name: _non_finite_kind(value) for name, value in values.items()}
    non_finite_ops = [op for op in ops if op.type != "Const" and _worst_overflow_kind(op.outputs, state)]
    for tensor in fed:
        if _worst_overflow_kind([tensor], state):
            return NonFiniteOrigin(tensor.op, [tensor.op.name, *(op.name for op in non_finite_ops)])
    for op in non_finite_ops:
        if not _worst_overflow_kind(op.inputs, state):
            return NonFiniteOrigin(op, [other.name for other in non_finite_ops])
    for op in non_finite_ops:
        if _worst_overflow_kind(op.outputs, state) == _NAN and _worst_overflow_kind(op.inputs, state) != _NAN:
            return NonFiniteOrigin(op, [other.name for other in non_finite_ops])
    return None


_FINITE, _INF, _NAN = range(3)


def _non_finite_kind(value):
    number = convert_to_savable_dtype(value)
    if number.dtype.kind not in "fc" or np.isfinite(number).all():
        return _FINITE
    return _NAN if np.isnan(number).any() else _INF


def _worst_overflow_kind(tensors, kind_by_name):
    return max((kind_by_name.get(tensor.name, _FINITE) for tensor in tensors), default=_FINITE)


def describe_operator(op: tf.Operation) -> str:
    """Returns type, name and line of an operator as text.

    For an operator that rounds, describes the operator whose values it rounds.
    """
    computing = rounding.operator_rounded_by(op)
    place = _script_line(computing)
    rounded = ", of values rounded to 16 bits" if computing is not op else ""
    return f"{computing.type} {computing.name!r}{rounded}{f', made at {place}' if place else ''}"


def _script_line(op) -> str:
    """Returns the file and line in the script that made an operator; "" if TensorFlow has no record of it."""
    installed = os.path.dirname(os.path.dirname(tf.__file__))
    for frame in reversed(op.traceback or ()):
        if not frame.filename.startswith((installed, *project_package_folders())):
            return f"{frame.filename}:{frame.lineno}"
    return ""
