"""Chooses the steps of a long training to record: the first thousand, then fewer and fewer, and all extremes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from npu_bridge.reporting.history import History

if TYPE_CHECKING:
    from npu_bridge.reporting.step_hook import Observation

# Every step of the first thousand, then one in 8, and so on with twice the interval for twice the steps: at three rows
# for each interval, a million steps make one megabyte.
_STEPS_AT_FULL_DETAIL = 1000
_FIRST_INTERVAL_STEPS = 8
# The global step is read once in this many rows, as this takes a session run, and at least this often: the failure of
# another rank ends this process, too.
_ROWS_PER_READ, _SECS_PER_READ = 100, 0.5


class ObservedStep(NamedTuple):
    """A step that was seen.

    Attributes:
      observation: the numbers of the step.
      time: the time of the step.
      updates: updates since the global step was last read, including this step's.
    """

    observation: Observation
    time: float
    updates: int


class HistoryThinner:
    """A collector of steps that chooses the steps to write.

    Args:
      step: global step at the start.
    """

    def __init__(self, step: int):
        self._known_step = step
        self._updates = 0
        self._steps_since = self._interval()  # the first step is kept
        self._lowest: ObservedStep | None = None  # of the steps since the last kept step
        self._highest: ObservedStep | None = None
        self._latest: ObservedStep | None = None
        self._kept: list[ObservedStep] = []

    def add(self, observation: Observation, time: float, steps: int) -> None:
        """Adds a session run of `steps` steps."""
        self._updates += 0 if observation.skipped else steps
        seen = ObservedStep(observation, time, self._updates)
        is_due = self._steps_since >= self._interval()
        if is_due or observation.skipped:
            self._keep_with_extremes(seen)
        else:
            loss = _loss_for_comparison(seen)
            if self._lowest is None or loss < _loss_for_comparison(self._lowest):
                self._lowest = seen
            if self._highest is None or loss > _loss_for_comparison(self._highest):
                self._highest = seen
            self._latest = seen
        if is_due:
            self._steps_since = 0
        self._steps_since += steps

    @property
    def is_full(self) -> bool:
        """Whether the global step must be read and the chosen steps must be written now."""
        kept = self._kept
        return bool(kept) and (len(kept) >= _ROWS_PER_READ or kept[-1].time - kept[0].time >= _SECS_PER_READ)

    def pop_rows(self, step: int | None, is_training_over: bool = False) -> list[tuple[int, ObservedStep]]:
        """Returns the chosen steps as pairs of global step and `ObservedStep`, and forgets them.

        Args:
          step: the current global step; None adds one for each update since the last known step. If the global step
            has grown by another number than the updates, the rows are spread evenly over its growth.
          is_training_over: whether to include the latest step.
        """
        if is_training_over and self._latest:
            self._keep_with_extremes(self._latest)
        step = self._known_step + self._updates if step is None else step
        moved = step - self._known_step
        pace = moved / self._updates if self._updates else 0.0
        rows = [(self._known_step + round(seen.updates * pace), seen) for seen in self._kept]
        waiting = (self._lowest, self._highest, self._latest)
        # The count restarts here; for steps that can still be kept, it becomes negative.
        self._lowest, self._highest, self._latest = (
            seen and seen._replace(updates=seen.updates - self._updates) for seen in waiting
        )
        self._known_step, self._updates, self._kept = step, 0, []
        return rows

    def write(self, history: History, step: int | None, is_training_over: bool = False) -> None:
        """Appends the steps of `pop_rows` to a history."""
        for reached, seen in self.pop_rows(step, is_training_over):
            history.append(reached, time=seen.time, **seen.observation._asdict())

    def _keep_with_extremes(self, seen: ObservedStep) -> None:
        between = {one for one in (self._lowest, self._highest, seen) if one is not None}
        self._kept += sorted(between, key=lambda one: (one.time, one.updates))
        self._lowest = self._highest = self._latest = None

    def _interval(self) -> int:
        doublings = ((self._known_step + self._updates) // _STEPS_AT_FULL_DETAIL + 1).bit_length() - 2
        return 1 if doublings < 0 else _FIRST_INTERVAL_STEPS << doublings


def _loss_for_comparison(seen_step: ObservedStep) -> float:
    """Returns the loss for comparisons: NaN counts as infinite, an unknown loss as 0."""
    loss = seen_step.observation.loss
    if loss is None:
        return 0.0
    return loss if math.isfinite(loss) else math.inf
