"""Defines the hooks of a trial: history, rounded initial weights, a list of operators, an early end.

Sessions get hooks, `model.fit` gets a callback.
"""

from __future__ import annotations

import json
import os
import traceback
import weakref
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base.files import write_atomically
from npu_bridge.base.secondary_files import NonFatalOutput
from npu_bridge.base.tf_internals.graphs import operator_definition
from npu_bridge.gradients.collections import UNSCALED_LOSS
from npu_bridge.graph.variables import changes_variable
from npu_bridge.reporting.history import HISTORY_FILE, History
from npu_bridge.reporting.history_hook import HistoryHook
from npu_bridge.reporting.keras_numbers import OptimizerNumbers, most_used_optimizer
from npu_bridge.session.hooked_session import TrainingHook
from npu_bridge.session.precision.rewriter import has_floating_type
from npu_run.trials.trial import Trial

# No precision mode lowers these operators alone, because they only move or hold values.
_NOT_LOWERED = ("Cast", "Const", "Identity", "NoOp", "Placeholder", "PlaceholderWithDefault", "ReadVariableOp", "Shape")


class TrialHistoryHook(HistoryHook, TrainingHook):
    """A hook that writes every step to `history.jsonl` in the trial's folder, unless the script writes this file.

    In a graph without a global step, training runs are counted instead.
    """

    def __init__(self, folder: str):
        super().__init__(os.path.join(folder, HISTORY_FILE))
        self._is_of_script: bool | None = None
        self._runs = 0
        self._graph: Any = None

    def begin(self):
        """Looks up the tensors to fetch, such as the loss of which the script computes gradients."""
        if self._is_of_script is None:
            self._is_of_script = os.path.exists(self.history.path)
        self._graph = tf.compat.v1.get_default_graph()
        super().begin()

    def after_create_session(self, session, coord):
        """Opens the history file."""
        if not self._is_of_script:
            super().after_create_session(session, coord)

    def before_run(self, run_context):
        """Requests the values to write for this run."""
        if self._is_of_script:
            return None
        graph = run_context.session.graph
        if graph is not self._graph:  # sessions of two graphs alternate
            with graph.as_default():
                self.begin()
        if not graph.get_collection(UNSCALED_LOSS) and self.training.loss is not None:
            # The default, the collection of losses, can hold only parts of the trained loss.
            self._fetches["loss"] = self.training.loss
        return super().before_run(run_context)

    def after_run(self, run_context, run_values):
        """Writes the step."""
        self._runs += 1
        if not self._is_of_script:
            super().after_run(run_context, run_values)

    def read_step(self, session) -> int:
        """Returns the global step; without one, the number of training runs so far."""
        return super().read_step(session) if self._global_step is not None else self._runs

    def end(self, session):
        """Closes the file."""
        self.history.close()


class RoundInitialWeightsHook(TrainingHook):
    """A hook that rounds each initial weight up, down or not at all, in the first session of a process.

    `draw` seeds the random changes: the same number changes the weights in the same way on every rank.
    """

    def __init__(self, draw: int):
        self._draw = draw
        self._is_done = False

    def after_create_session(self, session, coord):
        """Rounds the trained variables."""
        if self._is_done:
            return
        self._is_done = True
        variables = [each for each in session.graph.get_collection("trainable_variables") if each.dtype.is_floating]
        for variable, value in zip(variables, session.run(variables)):
            variable.load(round_at_random(value, self._draw, variable.op.name), session)


class OperatorListHook(TrainingHook):
    """A hook that writes a JSON list of the first training run's operators that a precision mode can lower.

    Each entry has `name`, `type`, and `where`: the script line that made the operator, or "".
    """

    def __init__(self, path: str):
        self._path = path

    def after_create_session(self, session, coord):
        """Writes the list of operators."""
        if os.path.exists(self._path):
            return
        listed = [
            {"name": op.name, "type": op.type, "where": _find_line(op)} for op in self.training.ops if _is_lowerable(op)
        ]
        NonFatalOutput(f"the list of operators {self._path}").attempt(
            write_atomically, self._path, json.dumps(listed, indent=1)
        )


class ParameterCountHook(TrainingHook):
    """A hook that writes to a file the number of trained parameters of the first training session."""

    def __init__(self, path: str):
        self._path = path

    def after_create_session(self, session, coord):
        """Writes the number of trained parameters."""
        write_parameter_count(self._path, session.graph.get_collection(tf.compat.v1.GraphKeys.TRAINABLE_VARIABLES))


def write_parameter_count(path: str, variables: Iterable[tf.Variable]) -> None:
    """Writes the total number of elements of variables to a file, unless the file exists."""
    count = sum(variable.shape.num_elements() or 0 for variable in variables)
    if not os.path.exists(path):
        NonFatalOutput(f"the number of parameters {path}").attempt(write_atomically, path, json.dumps(count))


class EndAfterStepsHook(TrainingHook):
    """A hook that ends the script, with exit code 0, after a number of training runs."""

    def __init__(self, steps: int):
        self._left = steps

    def after_run(self, run_context, run_values):
        """Raises SystemExit after the last run."""
        self._left -= 1
        if self._left <= 0:
            raise SystemExit(0)


class TrialCallback(tf.keras.callbacks.Callback):
    """A callback for `fit` that writes the history, rounds initial weights, counts parameters and ends the script.

    The history holds the loss that Keras shows. Several calls of `fit` make one history, in which the steps of an
    optimizer that begins anew are counted on.

    Ranks: local; only rank 0 writes.
    """

    def __init__(self, trial: Trial):
        super().__init__()
        self._trial = trial
        self._history = History(os.path.join(trial.folder, HISTORY_FILE)) if trial.folder else None
        self._has_begun, self._writes, self._batches = False, False, 0
        self._step = self._steps_before = 0  # before: those of optimizers of earlier calls
        self._rounded: weakref.WeakSet = weakref.WeakSet()

    def on_train_begin(self, logs=None):
        ranks, is_first, self._has_begun = collective.current(), not self._has_begun, True
        if is_first and self._history is not None:
            self._writes = ranks.rank == 0 and not os.path.exists(self._history.path)
        if self._writes:
            step = OptimizerNumbers.of(most_used_optimizer(self.model)).step
            self._steps_before = max(0, self._step - step)
            if is_first:
                self._history.begin_session(step, ranks=ranks.size)

    def on_train_batch_begin(self, batch, logs=None):
        if self._trial.rounding and self.model.built:
            self._round_weights_once()

    def _round_weights_once(self):
        if self.model in self._rounded:
            return
        self._rounded.add(self.model)
        weights = self.model.trainable_weights
        values = tf.keras.backend.batch_get_value(weights)
        changed = [round_at_random(value, self._trial.rounding, str(number)) for number, value in enumerate(values)]
        tf.keras.backend.batch_set_value(list(zip(weights, changed)))

    def on_train_batch_end(self, batch, logs=None):
        self._batches += 1
        if self._trial.rounding:
            self._round_weights_once()  # this model had no weights before its first batch
        if self._writes:
            numbers = OptimizerNumbers.of(most_used_optimizer(self.model))
            loss = (logs or {}).get("loss")
            self._step = self._steps_before + numbers.step
            self._history.append(self._step, None if loss is None else float(loss), numbers.loss_scale, False)
        if self._trial.parameters and self._writes:
            write_parameter_count(self._trial.parameters, self.model.trainable_variables)
        if self._batches == self._trial.steps:
            raise SystemExit(0)


def round_at_random(value: Any, draw: int, name: str) -> np.ndarray:
    """Returns an array whose numbers are rounded up, rounded down or unchanged at random; zeros stay zero.

    Args:
      value: a floating array.
      draw: number of the draw; the same draw and name make the same changes.
      name: name of the variable.
    """
    value = np.asarray(value)
    directions = np.random.RandomState([draw, zlib.crc32(name.encode())]).randint(-1, 2, value.shape)
    directions = np.where(value == 0, 0, directions)
    exact = value if value.dtype in (np.float32, np.float64, np.float16) else value.astype(np.float32)
    target = np.where(directions > 0, np.inf, -np.inf).astype(exact.dtype)
    changed = np.where(directions == 0, exact, np.nextafter(exact, target))
    return changed.astype(value.dtype)


def _is_lowerable(op: tf.Operation) -> bool:
    floats = [tensor for tensor in (*op.inputs, *op.outputs) if tensor.dtype == tf.float32]
    return bool(floats) and is_type_lowerable(op.type)


def is_type_lowerable(op_type: str) -> bool:
    """Returns whether a precision mode can lower a type of operators.

    Such operators change no variable, and compute in the dtype of their inputs.
    """
    definition = operator_definition(op_type)
    if op_type in _NOT_LOWERED or changes_variable(op_type) or definition is None or definition.is_stateful:
        return False
    return has_floating_type(op_type)


def _find_line(op: tf.Operation) -> str:
    """Returns the script line that made an operator, such as `train.py:31: tf.exp(logits)`; "" in the backward pass."""
    frames = [frame for frame in op.traceback or () if "site-packages" not in frame.filename]
    own = [frame for frame in frames if f"{os.sep}npu_bridge{os.sep}" not in frame.filename]
    if not own or "gradients" in op.name.split("/")[0]:
        return ""
    frame = traceback.FrameSummary(own[-1].filename, own[-1].lineno, own[-1].name)
    return f"{os.path.basename(frame.filename)}:{frame.lineno}: {frame.line}"
