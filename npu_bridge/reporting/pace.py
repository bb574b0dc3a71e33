"""Steps per second of a run: of late, and on the whole."""

from __future__ import annotations

import collections


class Pace:
    """Steps per second from marks of (steps tried so far, time now).

    The first mark is only the starting line. Place it after the first steps, so that start-up (building,
    compiling, filling queues) does not count.

    Args:
      window: how many of the latest intervals between marks make up the recent pace.
    """

    def __init__(self, window: int = 8):
        self._first: tuple[int, float] | None = None
        self._marks: collections.deque[tuple[int, float]] = collections.deque(maxlen=window + 1)

    def mark(self, steps: int, now_secs: float) -> None:
        """Records that `steps` steps have been tried at this time. Marks must not go backwards."""
        if self._first is None:
            self._first = (steps, now_secs)
        self._marks.append((steps, now_secs))

    @property
    def recent(self) -> float | None:
        """Steps per second over the window; None before the second mark."""
        return self._between(self._marks[0]) if self._marks else None

    @property
    def overall(self) -> float | None:
        """Steps per second since the first mark; None before the second mark."""
        return self._between(self._first) if self._first else None

    def _between(self, start: tuple[int, float]) -> float | None:
        steps, now = self._marks[-1]
        elapsed = now - start[1]
        return (steps - start[0]) / elapsed if elapsed > 0 else None
