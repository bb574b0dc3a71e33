"""Asks all ranks of a job to end after the same step; names ranks that do not answer in time."""

from __future__ import annotations

from collections.abc import Sequence

from npu_run.job.watched_rank import WatchedRank

# Ranks answer at once, from their own thread; a rank that does not answer is stopped, or its host is.
_ANSWER_SECS = 30.0


class StopAfterStep:
    """The stop of a job after a whole step; begins when `ask` is called.

    Args:
      ranks: the ranks of the job.
    Attributes:
      is_asked: whether the ranks were asked.
    """

    def __init__(self, ranks: Sequence[WatchedRank]):
        self.is_asked = False
        self._ranks = ranks
        self._asked_at = 0.0
        self._last: int | None = None

    @property
    def is_stop_announced(self) -> bool:
        """Whether the ranks have been told after which run to end."""
        return self._last is not None

    @property
    def is_stop_possible(self) -> bool:
        """Whether all ranks are in a training that can end after a step; otherwise there is nothing to save."""
        return bool(self._ranks) and all(rank.is_running and rank.can_stop_after_step for rank in self._ranks)

    def request_stop(self, now: float) -> None:
        """Asks all ranks to begin no further training run, and to report how many runs they have begun; asks once."""
        if self.is_asked:
            return
        self.is_asked, self._asked_at = True, now
        for rank in self._ranks:
            rank.process.send_order("hold")

    def announce_if_ready(self, now: float) -> bool:
        """Tells the ranks after which run to end, as soon as all ranks have answered; call it repeatedly.

        Returns:
          False if some ranks have not answered in time.
        """
        if not self.is_asked or self._last is not None:
            return True
        if all(rank.begun is not None for rank in self._ranks):
            # One more than any rank has begun: a rank between two runs has already checked whether to end.
            self._last = max(rank.begun or 0 for rank in self._ranks) + 1
            for rank in self._ranks:
                rank.process.send_order(f"end_after {self._last}")
        return self._last is not None or now < self._asked_at + _ANSWER_SECS
