"""Defines `HistoryHook`, which writes training steps into a `History`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base.arguments import check_count
from npu_bridge.reporting.history import Comparison, History
from npu_bridge.reporting.step_hook import Observation, StepHook
from npu_bridge.reporting.straggler_hook import latest_comparison
from npu_bridge.reporting.thinning import HistoryThinner
from npu_bridge.session import steps_per_run


class HistoryHook(StepHook):
    """A hook that records step, loss, loss scale, skips, learning rate and precision in a file, on rank 0.

    It records the first and the last comparison of a `StragglerHook`, and each comparison in which the slow ranks have
    changed.

    Args:
      history: the history to write to, or the path of its file.
      every_n_steps: record one step in n. The first step and skipped steps are always recorded. With
        `iterations_per_loop` N, only the last step of a run is seen. None: every step of the first thousand, then one
        in 8, in 16 and so on; between two recorded steps, the steps with the lowest and the highest loss. Rows are then
        written a hundred at a time, or twice a second.
      loss: tensor or name, see `StepHook`.
    Raises:
      ValueError: `every_n_steps` is below 1.
    Ranks: local; rank 0 writes.
    """

    def __init__(self, history: History | str, every_n_steps: int | None = 1, loss: tf.Tensor | str | None = None):
        super().__init__(loss)
        if every_n_steps is not None:
            check_count("HistoryHook", "every_n_steps", every_n_steps, "Leave every_n_steps out for every step.")
        self.history = history if isinstance(history, History) else History(history)
        self._leaves_out_steps = every_n_steps is None
        self._every_n_steps = every_n_steps or 1
        self._steps_since = self._every_n_steps  # the first step is recorded
        self._thinning: Any = None  # a `HistoryThinner` if steps are left out
        self._writes = False
        self._recorded_comparison: Comparison | None = None  # the last recorded comparison

    def begin(self):
        """Finds the tensors and the rank."""
        super().begin()
        self._writes = collective.current().rank == 0
        self._steps_since = self._every_n_steps

    def before_run(self, run_context):
        """Fetches the tensors on rank 0."""
        return super().before_run(run_context) if self._writes else None

    def after_create_session(self, session, coord):
        """Continues the file at the restored step."""
        del coord
        if self._writes:
            step = self.read_step(session)
            self.history.begin_session(step, ranks=collective.current().size)
            self._thinning = HistoryThinner(step) if self._leaves_out_steps else None
            self._recorded_comparison = None

    def on_step(self, session, observation: Observation) -> None:
        """Adds the rows that are due."""
        if not self._writes:
            return
        self._record_rank_comparison()
        steps = steps_per_run(session)
        if self._thinning is not None:
            self._thinning.add(observation, self.history.now, steps)
            if self._thinning.is_full:
                self._thinning.write(self.history, self.read_step(session))
            return
        if observation.skipped or self._steps_since >= self._every_n_steps:
            self.history.append(self.read_step(session), **observation._asdict())
        if self._steps_since >= self._every_n_steps:
            self._steps_since = 0
        self._steps_since += steps

    def end(self, session):
        """Writes the last step and closes the file."""
        self.write_last_step(self.read_step(session) if self._writes and self._thinning is not None else None)

    def write_last_step(self, step: int | None) -> None:
        """Writes the last step and closes the file, as `end` does, for a session that an error ends.

        Args:
          step: the global step; None if it cannot be read.
        """
        if self._writes and self._thinning is not None:
            self._thinning.write(self.history, step, is_training_over=True)
        if self._writes:
            self._record_rank_comparison(is_last=True)
        self.history.close()

    def _record_rank_comparison(self, is_last: bool = False):
        before, found = self._recorded_comparison, latest_comparison(self._graph)
        if found not in (None, before) and (is_last or before is None or before.slow != found.slow):
            self.history.note_comparison(found)
            self._recorded_comparison = found
