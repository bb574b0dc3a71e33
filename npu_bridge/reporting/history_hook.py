"""`HistoryHook`: writes training steps into a `History`."""

from __future__ import annotations

import math
from typing import NamedTuple

import tensorflow as tf

from npu_bridge.reporting.history import History
from npu_bridge.reporting.step_hook import Observation, StepHook
from npu_bridge.session import steps_per_run

# Every step of so many, then one in 8, and so on with twice the interval for twice the steps: at three rows for each
# interval, a million steps make one megabyte (ours).
_STEPS_AT_FULL_DETAIL = 1000
_FIRST_INTERVAL_STEPS = 8


class _Seen(NamedTuple):
    """A step that may be recorded later: what was observed, when, and after how many updates since the last row."""

    observation: Observation
    time: float
    updates: int


class HistoryHook(StepHook):
    """Records step, loss, loss scale, skipped steps, learning rate and precision in a file; only rank 0 writes.

    Args:
      history: where to write, or the path of the file.
      every_n_steps: record one step in n. The first step and skipped steps are always recorded. With
        `iterations_per_loop` N, a run's last step is all that is seen of it. None: every step of the first thousand,
        then one in 8, in 16 and so on, and of the steps between two of them those of the lowest and the highest loss.
      loss: tensor or name, see `StepHook`.
    Raises:
      ValueError: `every_n_steps` is below 1.
    Ranks: local; the file comes from rank 0.
    """

    def __init__(
        self,
        history: History | str,
        every_n_steps: int | None = 1,
        loss: tf.Tensor | str | None = None,
    ):
        super().__init__(loss)
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"HistoryHook: every_n_steps is out of range. Expected at least 1; got {every_n_steps}.")
        self.history = history if isinstance(history, History) else History(history)
        self._every_n_steps = every_n_steps
        self._communicator = None
        self._reset(step=0)

    def begin(self):
        """Looks up tensors and rank."""
        super().begin()
        from npu_bridge import collective  # only now: asking for the rank may start Horovod

        self._communicator = collective.current()

    def before_run(self, run_context):
        """Asks for the tensors on the rank that writes."""
        return super().before_run(run_context) if self._writes() else None

    def after_create_session(self, session, coord):
        """Continues the file at the restored step."""
        del coord
        if self._writes():
            self._reset(self.read_step(session))
            self.history.begin_session(self._step, ranks=self._communicator.size)

    def on_step(self, session, observation: Observation) -> None:
        """Adds the rows that are due."""
        if not self._writes():
            return
        is_due = self._steps_since >= self._interval()
        self._updates += 0 if observation.skipped else steps_per_run(session)
        if is_due or observation.skipped:
            self._record(session, observation)
        elif self._every_n_steps is None and observation.loss is not None:
            self._keep(_Seen(observation, self.history.now, self._updates))
        if is_due:
            self._steps_since = 0
        self._steps_since += steps_per_run(session)

    def end(self, session):
        """Records what came after the last row, and closes the file."""
        if self._writes() and self._extremes:
            self._add_extremes(self.read_step(session))
        self.history.close()

    def _reset(self, step: int):
        self._step = step  # of the last row
        self._steps_since = self._interval()  # the first step is recorded
        self._updates = 0
        self._extremes: list[_Seen] = []  # lowest and highest loss since the last row, then the latest

    def _interval(self) -> int:
        if self._every_n_steps is not None:
            return self._every_n_steps
        doublings = (self._step // _STEPS_AT_FULL_DETAIL + 1).bit_length() - 2
        return 1 if doublings < 0 else _FIRST_INTERVAL_STEPS << doublings

    def _record(self, session, observation: Observation):
        now, step = self.history.now, self.read_step(session)
        self._extremes = self._extremes[:2]
        self._add_extremes(step)
        self._append(step, observation, now)
        self._step, self._updates = step, 0

    def _keep(self, seen: _Seen):
        def loss(one):  # NaN stands above all numbers
            return one.observation.loss if math.isfinite(one.observation.loss) else math.inf

        candidates = [*self._extremes[:2], seen]
        self._extremes = [min(candidates, key=loss), max(candidates, key=loss), seen]

    def _add_extremes(self, step: int):
        """In the order in which they came. What a step is called is counted from the last row, where steps are read."""
        for seen in sorted(set(self._extremes), key=lambda one: (one.updates, one.time)):
            self._append(min(self._step + seen.updates, step), seen.observation, seen.time)
        self._extremes = []

    def _append(self, step: int, observation: Observation, time: float):
        seen = observation
        self.history.append(
            step, seen.loss, seen.loss_scale, seen.skipped, seen.learning_rate, seen.precision, time=time
        )

    def _writes(self) -> bool:
        return self._communicator is not None and self._communicator.rank == 0
