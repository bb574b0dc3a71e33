"""Defines `ProgressHook`, which shows a progress line while a session trains."""

from __future__ import annotations

import collections
import sys
import time
from typing import Callable, TextIO

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base.arguments import check_count
from npu_bridge.reporting.output import PlainOutput, choose_output
from npu_bridge.reporting.progress_line import Progress, format_progress, format_skip_note
from npu_bridge.reporting.step_hook import Observation, StepHook
from npu_bridge.reporting.straggler_hook import latest_comparison
from npu_bridge.reporting.stragglers import list_slow_ranks
from npu_bridge.session import steps_per_run

# Plain lines by default: about twenty per run, and at least one in half a minute.
_LINES_PER_RUN = 20
_STEPS_PER_LINE = 100
_SECS_PER_LINE = 30.0

# TF prepares a graph anew for every new set of fetches. Estimator's own hooks fetch more in the first run than later,
# and a `TensorBoardHook` fetches the norm in the third but not in the second. So these runs are slow and do not count.
_START_UP_RUNS = 3


class ProgressHook(StepHook):
    """A hook that shows step, percentage done, precision, loss, rates, skipped steps, slow ranks, pace and time left.

    The pace is in steps per second, and also in samples per second if the graph shows the number of samples in a batch.

    On a terminal, one line is rewritten; elsewhere, whole lines are printed from time to time. All ranks count, but
    only rank 0 prints. A separate line reports and explains the first skipped step.

    Args:
      total_steps: global step at which the run ends. None: percentage and time left are not shown.
      every_n_steps: steps between two lines, rounded to whole session runs of `iterations_per_loop` steps each. None:
        on a terminal, as often as one can read; elsewhere, a twentieth of `total_steps`, or 100, but at least one line
        in 30 seconds.
      loss: tensor or name, see `StepHook`.
      stream: where to write. None: the `sys.stdout` at the beginning of the training.
      clock: returns seconds, never going backwards.
      more_steps: the number of steps from the start of the first session, instead of `total_steps`.
    Raises:
      ValueError: `total_steps`, `every_n_steps` or `more_steps` is below 1.
    Ranks: local; rank 0 prints.
    Example:
      hook = ProgressHook(total_steps=1000)
      estimator.train(input_fn, hooks=[hook], max_steps=1000)
      print(hook.skipped_steps, hook.last_loss)
    """

    def __init__(
        self,
        total_steps: int | None = None,
        every_n_steps: int | None = None,
        loss: tf.Tensor | str | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        more_steps: int | None = None,
    ):
        super().__init__(loss)
        given = {"total_steps": total_steps, "every_n_steps": every_n_steps, "more_steps": more_steps}
        for name, value in given.items():
            if value is not None:
                check_count("ProgressHook", name, value, f"Leave {name} out if it is not known.")
        self._given_total_steps = total_steps
        self._more_steps = more_steps
        self._every_n_steps = every_n_steps
        self._stream = stream
        self._clock = clock
        self._output = PlainOutput()
        self._reset_counts()

    def begin(self):
        """Finds the tensors and the rank, and resets the counters."""
        super().begin()
        self._output = choose_output(self._stream or sys.stdout, is_printing=collective.current().rank == 0)
        self._reset_counts()

    def after_create_session(self, session, coord):
        """Records the step from which this session starts; also called when a lost session is recreated."""
        del coord
        self._pace, self._batch_pace = StepRate(), StepRate()
        self._start_step = self.read_step(session)
        self._skipped_before = self.skipped_steps
        self._runs_before = self._runs
        if self._total_steps is None and self._more_steps is not None:
            self._total_steps = self._start_step + self._more_steps

    def on_step(self, session, observation: Observation) -> None:
        """Counts the step, and shows a line if one is due."""
        self._count(observation)
        self._steps_per_run = steps_per_run(session)
        now = self._now = self._clock()
        if self._runs == self._runs_before + _START_UP_RUNS:
            self._record_rate(session, now)
        if self._is_due(now):
            self._print_progress(session, now)

    def end(self, session):
        """Shows the last step."""
        # If the data ends inside a loop, the loop's last steps are in no run that returned.
        if self._runs and (self._runs != self._shown_runs or self.read_step(session) != self.step):
            self._print_progress(session, self._now)  # without the time that other hooks take at the end
        self._output.close()

    def exclude_secs(self, secs: float) -> None:
        """Excludes some seconds since the last step (an evaluation, say) from the pace."""
        for pace in (self._pace, self._batch_pace):
            pace.exclude_secs(secs)

    def _reset_counts(self):
        self.step: int | None = None
        self.skipped_steps = 0
        self.last_loss: float | None = None
        self.loss_scale: float | None = None
        self.learning_rate: float | None = None
        self.precision: str | None = None
        self._total_steps = self._given_total_steps
        self._pace, self._batch_pace = StepRate(), StepRate()
        self._start_step = 0
        self._skipped_before = 0
        self._runs = 0
        self._runs_before = 0
        self._steps_per_run = 1
        self._shown_runs = 0
        self._shown_at = 0.0
        self._now = 0.0

    def _count(self, observation: Observation):
        self._runs += 1
        self.loss_scale = observation.loss_scale
        self.learning_rate, self.precision = observation.learning_rate, observation.precision
        if observation.loss is not None:
            self.last_loss = observation.loss
        if observation.skipped:
            self.skipped_steps += 1
            if self.skipped_steps == 1:
                self._output.note(format_skip_note(observation.loss_scale))

    def _is_due(self, now: float) -> bool:
        if self._runs == 1:
            return True
        steps, secs = (self._runs - self._shown_runs) * self._steps_per_run, now - self._shown_at
        if self._every_n_steps is not None:
            return steps >= self._every_n_steps
        if self._output.REFRESH_SECS is not None:
            return secs >= self._output.REFRESH_SECS
        steps_per_line = max(self._total_steps // _LINES_PER_RUN, 1) if self._total_steps else _STEPS_PER_LINE
        return steps >= steps_per_line or secs >= _SECS_PER_LINE

    def _record_rate(self, session, now: float):
        self.step = self.read_step(session)
        if self._runs >= self._runs_before + _START_UP_RUNS:
            self._pace.record_steps(self._tried_steps(), now)
            self._batch_pace.record_steps((self._runs - self._runs_before) * self._steps_per_run, now)

    def _print_progress(self, session, now: float):
        self._record_rate(session, now)
        progress = Progress(
            step=self.step,  # type: ignore[arg-type]  # known once a run is marked
            total_steps=self._total_steps,
            loss=self.last_loss,
            loss_scale=self.loss_scale,
            skipped_steps=self.skipped_steps,
            steps_per_sec=self._pace.recent_rate,
            precision=self.precision,
            learning_rate=self.learning_rate,
            samples_per_sec=self._samples_per_sec(),
            slow=list_slow_ranks(latest_comparison(self._graph)),
        )
        self._output.show(format_progress(progress, self._output.width))
        self._shown_runs, self._shown_at = self._runs, now

    def _samples_per_sec(self) -> float | None:
        """Returns the samples of all ranks per second; a step has several batches if gradients are accumulated."""
        # Not from the steps: a loop's run shows only whether its last step was skipped.
        pace, samples = self._batch_pace.recent_rate, self.samples_per_step
        return None if not pace or samples is None else pace * samples

    def _tried_steps(self) -> int:
        """Returns the number of steps tried in this session, including skipped steps."""
        return (self.step or 0) - self._start_step + self.skipped_steps - self._skipped_before


class StepRate:
    """The recent steps per second, computed from marks: pairs of steps tried so far and time.

    The first mark is only the start. Set it after the first steps, so that the start-up (building, compiling, filling
    queues) does not count.

    Args:
      window: the number of intervals between marks over which the recent pace is computed.
    """

    def __init__(self, window: int = 8):
        self._marks: collections.deque[tuple[int, float]] = collections.deque(maxlen=window + 1)

    def record_steps(self, steps: int, now_secs: float) -> None:
        """Records the number of steps tried until a time; neither number may decrease from call to call."""
        self._marks.append((steps, now_secs))

    def exclude_secs(self, secs: float) -> None:
        """Excludes `secs` seconds since the last mark from the pace, by moving all marks forward by `secs`."""
        self._marks = collections.deque([(steps, now + secs) for steps, now in self._marks], self._marks.maxlen)

    @property
    def recent_rate(self) -> float | None:
        """Steps per second over the latest `window` intervals; None before the second mark."""
        if not self._marks:
            return None
        (first_steps, began), (steps, now) = self._marks[0], self._marks[-1]
        return (steps - first_steps) / (now - began) if now > began else None
