"""Asks the ranks of a job to end after one and the same step: `session/elastic/stop_request.py` is their side of it."""

from __future__ import annotations

from collections.abc import Sequence

from npu_bridge.launch.job.watched_rank import WatchedRank

__all__ = ["OrderedStop"]

# Ranks answer from a thread of their own, at once; one that does not is stopped, or its host is.
_ANSWER_SECS = 30.0


class OrderedStop:
    """The end of one job after a whole step; nothing has been asked for yet.

    Args:
      ranks: those of the job.
    Attributes:
      is_asked: whether the ranks were asked.
    """

    def __init__(self, ranks: Sequence[WatchedRank]):
        self.is_asked = False
        self._ranks = ranks
        self._asked_at = 0.0
        self._last: int | None = None

    @property
    def has_told(self) -> bool:
        """Whether the ranks know after which run they end."""
        return self._last is not None

    @property
    def is_possible(self) -> bool:
        """Whether all ranks are in a training that would end; elsewhere nothing would be saved, and nothing is lost."""
        return bool(self._ranks) and all(rank.is_running and rank.heeds for rank in self._ranks)

    def ask(self, now: float) -> None:
        """Asks all ranks to begin no further training run, and how many they have begun."""
        self.is_asked, self._asked_at = True, now
        for rank in self._ranks:
            rank.process.ask("hold")

    def turn(self, now: float) -> bool:
        """Tells the ranks when to end, as soon as all have answered.

        Returns:
          False once it is clear that they will not.
        """
        if not self.is_asked or self._last is not None:
            return True
        if all(rank.begun is not None for rank in self._ranks):
            # One more than any rank has begun: some may be between two runs, past asking whether it was the last one.
            self._last = max(rank.begun or 0 for rank in self._ranks) + 1
            for rank in self._ranks:
                rank.process.ask(f"end_after {self._last}")
        return self._last is not None or now < self._asked_at + _ANSWER_SECS
