"""`HistoryHook`: writes every training step into a `History`."""

from __future__ import annotations

import tensorflow as tf

from npu_bridge.reporting.history import History
from npu_bridge.reporting.step_hook import Observation, StepHook
from npu_bridge.session import steps_per_run


class HistoryHook(StepHook):
    """Records step, loss, loss scale and skipped steps in a file; only rank 0 writes.

    Args:
      history: where to write, or the path of the file.
      every_n_steps: record one step in n. The first step and skipped steps are always recorded. With
        `iterations_per_loop` N, a run's last step is all that is seen of it.
      loss: tensor or name, see `StepHook`.
    Raises:
      ValueError: `every_n_steps` is below 1.
    Ranks: local; the file comes from rank 0.
    """

    def __init__(
        self,
        history: History | str,
        every_n_steps: int = 1,
        loss: tf.Tensor | str | None = None,
    ):
        super().__init__(loss)
        if every_n_steps < 1:
            raise ValueError(f"HistoryHook: every_n_steps is out of range. Expected at least 1; got {every_n_steps}.")
        self.history = history if isinstance(history, History) else History(history)
        self._every_n_steps = every_n_steps
        self._steps_since = every_n_steps  # the first step is recorded
        self._communicator = None

    def begin(self):
        """Looks up tensors and rank."""
        super().begin()
        from npu_bridge import collective  # only now: asking for the rank may start Horovod

        self._communicator = collective.current()
        self._steps_since = self._every_n_steps

    def before_run(self, run_context):
        """Asks for the tensors on the rank that writes."""
        return super().before_run(run_context) if self._writes() else None

    def after_create_session(self, session, coord):
        """Continues the file at the restored step."""
        del coord
        if self._writes():
            self.history.begin_session(self.read_step(session), ranks=self._communicator.size)

    def on_step(self, session, observation: Observation) -> None:
        """Adds one row."""
        if not self._writes():
            return
        if observation.skipped or self._steps_since >= self._every_n_steps:
            self.history.append(self.read_step(session), observation.loss, observation.loss_scale, observation.skipped)
        if self._steps_since >= self._every_n_steps:
            self._steps_since = 0
        self._steps_since += steps_per_run(session)

    def end(self, session):
        """Closes the file."""
        del session
        self.history.close()

    def _writes(self) -> bool:
        return self._communicator is not None and self._communicator.rank == 0
