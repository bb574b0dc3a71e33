"""Whether this process was asked to end after a whole step, and after which one: the same one on every rank.

A scheduler that takes a machine away sends SIGTERM some time before. A rank alone hears the signal itself. Of several
ranks each may be in another step by then, and one that ended too early would leave the others waiting for its
gradients. So the launcher hears the signal for all. It asks every rank to begin no further run, hears from each how
many it has begun, and tells all of them one more than the largest of these numbers: after that many runs they end.
While nobody asks, this costs no transfer.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any, Callable

__all__ = ["STOPPED_EXIT_CODE", "StopRequest", "of_this_process"]

# EX_TEMPFAIL: the job can be started again, and goes on.
STOPPED_EXIT_CODE = 75


class StopRequest:
    """What one process knows about its end. Training runs are counted from the start of the process.

    Methods may be called from any thread; `heeded` and `begin_run` belong to the thread that trains.
    """

    def __init__(self):
        self._changed = threading.Condition()
        self._send: Callable[[dict[str, Any]], None] | None = None
        self._begun = 0
        self._heeds = self._is_held = False
        self._last: int | None = None

    def attach(self, send: Callable[[dict[str, Any]], None]) -> None:
        """From now on a launcher decides; `send` takes messages to it."""
        self._send = send

    @contextlib.contextmanager
    def heeded(self, size: int) -> Iterator[None]:
        """A block in which a training counts its runs, and ends when it is asked to.

        Args:
          size: number of ranks. Nothing is heeded where several ranks have no launcher of ours, as nobody could make
            them agree; nor where the script has a handler of its own for the signal.
        """
        is_main = threading.current_thread() is threading.main_thread()  # which alone may set a handler
        is_free = is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if self._heeds or not is_free or (size > 1 and self._send is None):
            yield
            return
        self._note_heeding(True)
        try:
            with _at_sigterm(self._hear_signal):
                yield
        finally:
            self._note_heeding(False)

    def begin_run(self) -> None:
        """Counts a training run; after `hold`, it does not begin before the last one is known."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_held)
            self._begun += 1

    def hold(self) -> None:
        """Lets no further run begin, and tells the launcher how many have begun."""
        with self._changed:
            self._is_held = True
            begun = self._begun
        if self._send is not None:
            self._send({"begun": begun})

    def end_after(self, last: int) -> None:
        """Lets runs begin again, up to the one with this number."""
        with self._changed:
            self._last, self._is_held = last, False
            self._changed.notify_all()

    @property
    def is_due(self) -> bool:
        """Whether all runs were made that should be; ask between two runs."""
        return self._last is not None and self._begun >= self._last

    def leave(self, step: int | None) -> None:
        """Ends the process with the exit code that says so, once what there is to save is saved.

        Args:
          step: the global step that was reached; None where nothing counts steps.
        """
        if self._send is not None:
            self._send({"stopped_after": step})
        raise SystemExit(STOPPED_EXIT_CODE)

    def end_at_once(self) -> None:
        """Kills this process and what it has started; a signal would wait for a call into TensorFlow to return."""
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def _note_heeding(self, heeds: bool) -> None:
        self._heeds = heeds
        if self._send is not None:
            self._send({"heeds": heeds})

    def _hear_signal(self) -> None:
        if self._send is None:
            self.end_after(self._begun)
        else:
            self._send({"was_told": "SIGTERM"})


@contextlib.contextmanager
def _at_sigterm(heard: Callable[[], None]) -> Iterator[None]:
    """In this block of the main thread the first SIGTERM calls `heard`; a second one ends the process at once."""
    owner = os.getpid()

    def handle(number, frame):
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() != owner:  # a process that the script has forked
            os.kill(os.getpid(), number)
        heard()

    signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # not the main thread: a hook that was left over is collected in any
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


_OF_THIS_PROCESS = StopRequest()


def of_this_process() -> StopRequest:
    """The one of this process."""
    return _OF_THIS_PROCESS
