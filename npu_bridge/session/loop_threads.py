"""Chooses the faster threads for repeated small steps: TensorFlow's inter-op pool, or the calling thread alone."""

from __future__ import annotations

POOL, CALLER = 0, -1  # as RunOptions.inter_op_thread_pool names them
# Ours: three trials each. A step that takes longer than this gains nothing from saving a thread switch, and may have
# work for several threads.
_TRIALS = 3
_LONGEST_SECS = 1e-3


class LoopThreads:
    """Tries both in turns and stays with the one whose best loop was faster; with what is settled nothing is tried.

    Handing a small operator to another thread takes longer than computing it: a step of 0.14 ms took 0.09 ms without
    (2 cores, TensorFlow 2.15). Larger steps are better off with the pool. What is computed is the same.
    """

    def __init__(self, settled: int | None = None):
        self._has_warmed_up = False
        self._secs: dict[int, list[float]] = {POOL: [], CALLER: []}
        self._settled = settled

    def choose(self) -> int:
        """For the next loop: `POOL` or `CALLER`."""
        if self._settled is not None:
            return self._settled
        return POOL if len(self._secs[POOL]) <= len(self._secs[CALLER]) else CALLER

    def took(self, choice: int, steps: int, secs: float) -> None:
        """Tells how long a loop took. The first one, in which TensorFlow prepares the graph, does not count."""
        if self._settled is not None:
            return
        if not self._has_warmed_up:
            self._has_warmed_up = True
            return
        self._secs[choice].append(secs / steps)
        if min(self._secs[POOL], default=0.0) > _LONGEST_SECS:
            self._settled = POOL
        elif len(self._secs[CALLER]) == _TRIALS:
            self._settled = min(self._secs, key=lambda each: min(self._secs[each]))
