"""Holds the switch of an accelerated training to its configured precision, and the hook that reports its progress."""

from __future__ import annotations

import threading
from typing import Callable

import numpy as np
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base import environment
from npu_bridge.base.terminal import logger
from npu_bridge.collective.apart import GraphApart
from npu_bridge.options import AccelerateTrainMode
from npu_bridge.session.precision.accelerate import VARIABLES, Progress, Verdict, describe, judge, read_progress

_LOG = logger(__name__)
_BALLOT = "npu_bridge_precision_ballot"


class Switch:
    """The one-way switch of a training from low to original precision.

    It reads the progress from the environment before every run (`STEP_NOW` and `TOTAL_STEP`, or `LOSS_NOW` and
    `TARGET_LOSS`), which `TellMeStepOrLossHook` or the script writes. Ranks decide together: the switch comes when it
    is due on every rank, so they never compute one step in different precisions.
    """

    def __init__(
        self, plan: AccelerateTrainMode, steps_per_run: int = 1, original: str = "float32", low: str | None = None
    ):
        self.plan = plan
        self._low = low or plan.low_dtype
        self.has_happened = False
        self._steps_per_run = steps_per_run
        self._original = original
        self._plan_text = ""
        self._lock = threading.RLock()
        self._started: set[frozenset[str]] = set()
        self._fallback: Callable[[], Progress] | None = None
        self._has_warned = False
        self._maximum: GraphApart | None = None
        self._runs_to_skip = 0

    def count_steps_with(self, fallback: Callable[[], Progress] | None) -> None:
        """Sets the function that returns the progress of a step trigger when neither of its variables is set."""
        self._fallback = fallback if self.plan.trigger == "step" else None

    def is_over(self, training: frozenset[str]) -> bool:
        """Returns whether a run that is about to start runs in the original precision.

        Before the switch, the first run of a training is always in low precision. Trainings of a process are kept
        apart by the variables they train.

        Raises:
          ValueError: before the first run, the variables of the trigger are missing or unusable.
        Ranks: collective while the switch has not happened; every rank asks before every training run.
        """
        with self._lock:
            if self.has_happened:
                return True
            if training not in self._started:
                progress = self._progress()
                if not self._started:
                    self._plan_text = describe(self.plan, progress, self._steps_per_run, self._original, self._low)
                self._started.add(training)
                return False
            verdict = self._judge()
            if self._agree(verdict.runs_left) > 0:
                return False
            self.has_happened = True
            if not verdict.is_expected:
                _LOG.warning(
                    "accelerate_train_mode: the switch comes earlier or later than planned. Expected STEP_NOW to "
                    "reach the ratio of TOTAL_STEP exactly; got STEP_NOW=%s of TOTAL_STEP=%s with %d steps in a run. "
                    "The last run of a training is always in the original precision.",
                    *(reversed(self._texts())),
                    self._steps_per_run,
                )
            return True

    def tell_plan(self, is_in_vain: bool = False) -> None:
        """Logs, once a training has begun, which of its steps are in which precision, unless none is lowered."""
        text, self._plan_text = self._plan_text, ""
        if text and not is_in_vain:
            self._say("precision: %s.", text)

    def report(self, secs: float, what_took: str = "building it") -> None:
        """Logs that the switch has happened, and how long the new executor took."""
        texts = {trigger: environment.read_variable(now) for trigger, (_, now) in VARIABLES.items()}
        where = ", ".join(f"{trigger} {text}" for trigger, text in texts.items() if text)
        self._say(
            "precision: %s from here on (%s); %s took %.2f s.",
            self._original,
            where or "progress counted by the global step",
            what_took,
            secs,
        )

    def _judge(self) -> Verdict:
        try:
            return judge(self.plan, self._progress(), self._steps_per_run)
        except ValueError as error:
            if not self._has_warned:
                self._has_warned = True
                _LOG.warning("accelerate_train_mode: training continues in %s. %s", self._low, error)
            return Verdict(1)

    def _progress(self) -> Progress:
        texts = self._texts()
        if self._fallback is not None and texts == (None, None):
            return self._fallback()
        return read_progress(self.plan.trigger, *texts)

    def _texts(self) -> tuple[str | None, str | None]:
        goal, now = VARIABLES[self.plan.trigger]
        return environment.read_variable(goal), environment.read_variable(now)

    def _agree(self, runs_left: int) -> int:
        """Returns the most runs that any rank has left; the ranks exchange numbers again only after those."""
        communicator = collective.current()
        if communicator.size == 1:
            return runs_left
        if self._runs_to_skip > 0:
            self._runs_to_skip -= 1
            return 1
        if self._maximum is None:
            self._maximum = GraphApart(lambda own: communicator.reduce(own, "max", _BALLOT), np.int64(0))
        most = int(self._maximum.run(runs_left))
        self._runs_to_skip = max(most - 1, 0)
        if most == 0:
            self._maximum.close()
        return most

    def _say(self, text: str, *values: object) -> None:
        if environment.probable_rank() == 0:
            _LOG.info(text, *values)


class ProgressVariablesHook(tf.estimator.SessionRunHook):
    """Writes `STEP_NOW` and `TOTAL_STEP`, or `LOSS_NOW` and `TARGET_LOSS`, after every run; the switch reads them.

    Arguments and errors are those of the documented hook.
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
        known.update((name, goal) for name, goal in goals.items() if goal is not None)
        for name, value in known.items():
            environment.write_variable(name, value)

    def begin(self):
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
                    f"of a tensor or variable; got {name!r}. Name the loss with tf.identity(loss, name=...)."
                ) from error

    def after_create_session(self, session, coord):
        # A resumed training starts after step 0.
        if "STEP_NOW" in self._variables:
            environment.write_variable("STEP_NOW", session.run(self._variables["STEP_NOW"]))

    def before_run(self, run_context):
        return tf.estimator.SessionRunArgs(self._fetches)

    def after_run(self, run_context, run_values):
        values = {**run_values.results, **run_context.session.run(self._variables)}
        if all(value is None for value in values.values()):
            raise ValueError(
                f"{self._where}: the run gave no value. Expected a number for {' or '.join(self._asked)}; got "
                f"{values}. Name tensors, not operators."
            )
        for name, value in values.items():
            if value is not None:
                environment.write_variable(name, value)
