"""Defines the switch of an accelerated training to its configured precision, and a hook that feeds the switch."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base import environment
from npu_bridge.base.terminal import logger
from npu_bridge.collective.apart import SeparateGraph
from npu_bridge.options import AccelerateTrainMode
from npu_bridge.session.precision.accelerate import (
    VARIABLES,
    SwitchDecision,
    TrainingProgress,
    decide_switch,
    describe_plan,
    parse_progress,
)

_LOG = logger(__name__)
_BALLOT = "npu_bridge_precision_ballot"


class Switch:
    """The one-way switch of a training from low to original precision.

    Before every run it reads the progress from environment variables (`STEP_NOW` and `TOTAL_STEP`, or `LOSS_NOW` and
    `TARGET_LOSS`), which `TellMeStepOrLossHook` or the script sets. Ranks decide together: they switch when the switch
    is due on every rank, so they never compute a step in different precisions.
    """

    def __init__(
        self, plan: AccelerateTrainMode, steps_per_run: int = 1, original: str = "float32", low: str | None = None
    ):
        self.plan = plan
        self._low = low or plan.low_dtype
        self.has_happened = False
        self._steps_per_run = self._batches_per_run = steps_per_run
        self._original = original
        self._plan_text = ""
        self._lock = threading.RLock()
        self._started: set[frozenset[str]] = set()
        self._fallback: Callable[[], TrainingProgress] | None = None
        self._has_warned = False
        self._maximum: SeparateGraph | None = None
        self._runs_to_skip = 0
        self._switched: dict[tuple[AccelerateTrainMode, frozenset[str]], float] = {}

    def continue_trainings(self, switched: dict[tuple[AccelerateTrainMode, frozenset[str]], float]) -> None:
        """Uses no low-precision run for trainings that are at or after the step of their switch in an earlier session.

        Args:
          switched: the step at which each training has switched; this switch adds its own.
        """
        self._switched = switched

    def set_step_fallback(self, fallback: Callable[[], TrainingProgress] | None) -> None:
        """Sets a function that returns the progress if neither environment variable of a step trigger is set."""
        self._fallback = fallback if self.plan.trigger == "step" else None

    def set_batches_per_step(self, batches: int) -> None:
        """Sets the number of batches of a counted step (an update): above 1 with `Accumulate`."""
        self._steps_per_run = -(-self._batches_per_run // batches)

    def must_use_original_precision(self, training: frozenset[str]) -> bool:
        """Returns whether a run that is about to start must use the original precision.

        Before the switch, the first run of a training always uses low precision. Several trainings of a process are
        distinguished by the variables that they train.

        Raises:
          ValueError: before the first run, the environment variables of the trigger are missing or unusable.
        Ranks: collective until the switch; every rank calls it before every training run.
        """
        with self._lock:
            if self.has_happened:
                return True
            if training not in self._started:
                progress = self._read_progress()
                if progress.now >= self._switched.get((self.plan, training), math.inf):
                    self.has_happened = True
                    return True
                if not self._started:
                    self._plan_text = describe_plan(self.plan, progress, self._steps_per_run, self._original, self._low)
                self._started.add(training)
                return False
            decision = self._decide_switch()
            if self._agree_on_runs_left(decision.runs_left) > 0:
                return False
            self.has_happened = True
            if self.plan.trigger == "step":
                self._switched.update({(self.plan, each): self._read_progress().now for each in self._started})
            if not decision.is_expected:
                _LOG.warning(
                    "accelerate_train_mode: the precision does not change exactly at the requested ratio of "
                    "TOTAL_STEP. Expected a run to end there; got STEP_NOW=%s of TOTAL_STEP=%s with %d steps in a run. "
                    "The last run of a training is always in the original precision.",
                    *(reversed(self._progress_texts())),
                    self._steps_per_run,
                )
            return True

    def log_plan(self, has_no_effect: bool = False) -> None:
        """Logs once which steps run in which precision; logs nothing if no operator is lowered (`has_no_effect`)."""
        text, self._plan_text = self._plan_text, ""
        if text and not has_no_effect:
            self._log_on_rank_0("precision: %s.", text)

    def log_switch(self, secs: float, timed_work: str = "building it") -> None:
        """Logs that the switch has happened, and how long building the new executor took."""
        texts = {trigger: environment.read_variable(now) for trigger, (_, now) in VARIABLES.items()}
        where = ", ".join(f"{trigger} {text}" for trigger, text in texts.items() if text)
        self._log_on_rank_0(
            "precision: %s from here on (%s); %s took %.2f s.",
            self._original,
            where or "progress counted by the global step",
            timed_work,
            secs,
        )

    def _decide_switch(self) -> SwitchDecision:
        try:
            return decide_switch(self.plan, self._read_progress(), self._steps_per_run)
        except ValueError as error:
            if not self._has_warned:
                self._has_warned = True
                _LOG.warning("accelerate_train_mode: training continues in %s. %s", self._low, error)
            return SwitchDecision(1)

    def _read_progress(self) -> TrainingProgress:
        texts = self._progress_texts()
        if self._fallback is not None and texts == (None, None):
            return self._fallback()
        return parse_progress(self.plan.trigger, *texts)

    def _progress_texts(self) -> tuple[str | None, str | None]:
        goal, now = VARIABLES[self.plan.trigger]
        return environment.read_variable(goal), environment.read_variable(now)

    def _agree_on_runs_left(self, runs_left: int) -> int:
        """Returns the maximum of all ranks' `runs_left`; the ranks communicate again only after that many runs."""
        communicator = collective.current()
        if communicator.size == 1:
            return runs_left
        if self._runs_to_skip > 0:
            self._runs_to_skip -= 1
            return 1
        if self._maximum is None:
            self._maximum = SeparateGraph(lambda own: communicator.reduce(own, "max", _BALLOT), np.int64(0))
        most = int(self._maximum.run(runs_left))
        self._runs_to_skip = max(most - 1, 0)
        if most == 0:
            self._maximum.close()
        return most

    def _log_on_rank_0(self, text: str, *values: object) -> None:
        if environment.probable_rank() == 0:
            _LOG.info(text, *values)


class ProgressVariables:
    """The environment variables in which one training tells `Switch` its progress, from its begin to its end."""

    def __init__(self):
        self._texts: dict[str, str] = {}

    def write(self, values: Mapping[str, object]) -> None:
        """Writes variables, and again those that this training wrote before: another training can have ended since."""
        self._texts.update((name, str(value)) for name, value in values.items())
        for name, text in self._texts.items():
            environment.write_variable(name, text)

    def remove(self) -> None:
        """Unsets the variables, which would mislead the next training; texts of other writers stay."""
        for name, text in self._texts.items():
            if environment.read_variable(name) == text:
                environment.write_variable(name, None)


class ProgressVariablesHook(tf.estimator.SessionRunHook):
    """A hook that sets `STEP_NOW` and `TOTAL_STEP`, or `LOSS_NOW` and `TARGET_LOSS`, after every run, for `Switch`.

    Unsets them when the training ends. Arguments and errors are those of `TellMeStepOrLossHook`.
    """

    def __init__(self, step=None, total_step=None, loss=None, final_loss=None):
        self._where = type(self).__name__
        if step is None and loss is None:
            raise ValueError(
                f"{self._where}: there is nothing to report. Expected step or loss; got None for both. Pass "
                f'step="global_step:0" and total_step=..., or loss and final_loss=....'
            )
        self._asked = {"STEP_NOW": step, "LOSS_NOW": loss}
        self._fetches = {}
        self._variables = {}
        starts = {"STEP_NOW": "0", "LOSS_NOW": "0.0"}
        goals = {"TOTAL_STEP": total_step, "TARGET_LOSS": final_loss}
        known = {name: start for name, start in starts.items() if self._asked[name] is not None}
        self._progress = ProgressVariables()
        self._progress.write({**known, **{name: goal for name, goal in goals.items() if goal is not None}})

    def begin(self):
        self._progress.write({})  # again, as the hook of another training can have been made since
        graph = tf.compat.v1.get_default_graph()
        variables = {variable.op.name: variable for variable in tf.compat.v1.global_variables()}
        self._fetches, self._variables = {}, {}
        for key, asked in self._asked.items():
            if asked is None:
                continue
            name = asked if isinstance(asked, str) else asked.name
            variable = variables.get(name[:-2] if name.endswith(":0") else name)
            if variable is not None:
                # Not fetched with the run, which could return the value before or after the update.
                self._variables[key] = variable
                continue
            try:
                tensor_name = name if ":" in name else f"{name}:0"
                self._fetches[key] = graph.as_graph_element(tensor_name, allow_operation=False)
            except (KeyError, ValueError) as error:
                raise ValueError(
                    f"{self._where}: {'step' if key == 'STEP_NOW' else 'loss'} is not in this graph. Expected the name "
                    f"of a tensor or variable; got {name!r}. Name the tensor with tf.identity(tensor, name=...)."
                ) from error

    def after_create_session(self, session, coord):
        # A resumed training starts after step 0.
        if "STEP_NOW" in self._variables:
            self._progress.write({"STEP_NOW": session.run(self._variables["STEP_NOW"])})

    def before_run(self, run_context):
        return tf.estimator.SessionRunArgs(self._fetches)

    def after_run(self, run_context, run_values):
        values = {**run_values.results, **run_context.session.run(self._variables)}
        if all(value is None for value in values.values()):
            raise ValueError(
                f"{self._where}: the run gave no value. Expected a number for {' or '.join(self._asked)}; got "
                f"{values}. Name tensors, not operators."
            )
        self._progress.write({name: value for name, value in values.items() if value is not None})

    def end(self, session):
        del session
        self._progress.remove()
