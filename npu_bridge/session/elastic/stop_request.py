"""Receives requests to end this process after a whole step, which is the same step on every rank.

A scheduler that is about to reclaim a machine first sends SIGTERM. A single rank handles the signal itself. Several
ranks can be in different steps, and a rank that ended too early would leave the others waiting for its gradients. So
the launcher handles the signal for all ranks. It asks every rank to begin no further run, and gets from each rank the
number of runs begun. It sends all ranks one more than the largest of these numbers: the ranks end after that many runs.
Without a request this needs no communication between ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Callable

# Windows of accumulation that begin in different batches need not end in the same one (our limit).
_MOST_BATCHES_TO_WAIT = 1000
# EX_TEMPFAIL: the job can be started again, and resumes.
STOPPED_EXIT_CODE = 75


class StopRequest:
    """A receiver of requests to end this process; it also counts the training runs that this process has begun.

    Methods can be called from any thread; `handle_requests` and `begin_run` only from the thread that trains.
    """

    def __init__(self):
        self._changed = threading.Condition()
        self._send: Callable[[dict[str, Any]], None] | None = None
        self._begun, self._size = 0, 1
        self._threads: set[int] = set()  # that have begun runs since the first open block
        self._is_held = False
        self._open_blocks = 0
        self._owner: int | None = None  # the process that handles signals
        self._last: int | None = None

    def connect_launcher(self, send: Callable[[dict[str, Any]], None]) -> None:
        """Lets the launcher decide, from now on, when the training ends; `send` sends a message to the launcher."""
        self._send = send

    @contextlib.contextmanager
    def handle_requests(self, size: int) -> Iterator[None]:
        """Handles requests to end the process, for a block in which a training counts its runs.

        Args:
          size: number of ranks. Several ranks that `npu-run` did not start ignore requests, as they could not agree on
            a step. Requests are also ignored if the script has its own handler for SIGTERM.

        The block of a training that ended with an error can stay open until Python collects it, so blocks can overlap.
        The first block begins to handle requests, and the last one stops it.
        """
        is_main = threading.current_thread() is threading.main_thread()  # no other thread may set a handler
        is_free = is_main and signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, self._on_sigterm)
        with self._changed:  # a leftover hook can be collected in any thread
            is_handled = self._open_blocks > 0 or (is_free and (size == 1 or self._send is not None))
            if is_handled and not self._open_blocks:
                self._threads, self._size = set(), size
                self._report_handling(True)
                self._owner = os.getpid()
                signal.signal(signal.SIGTERM, self._on_sigterm)
            self._open_blocks += is_handled
        try:
            yield
        finally:
            with self._changed:
                self._open_blocks -= is_handled
                if is_handled and not self._open_blocks:
                    if signal.getsignal(signal.SIGTERM) == self._on_sigterm:  # the script can have set its own
                        with contextlib.suppress(ValueError):  # not in the main thread
                            signal.signal(signal.SIGTERM, signal.SIG_DFL)
                    self._report_handling(False)

    def begin_run(self) -> None:
        """Counts a training run; after `block_new_runs`, waits until the number of the last run is known.

        Threads that train at once begin their runs in any order on each rank. So a count cannot end the training
        after the same step on all ranks, and this is reported to the launcher.
        """
        thread = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: not self._is_held)
            self._begun += 1
            is_second = len(self._threads | {thread}) == 2 > len(self._threads)
            self._threads.add(thread)
        if is_second and self._size > 1 and self._open_blocks:
            self._report_handling(False)

    def block_new_runs(self) -> None:
        """Keeps further runs from beginning, and sends the launcher the number of runs begun."""
        with self._changed:
            self._is_held = True
            begun = self._begun
        if self._send is not None:
            self._send({"begun": begun})

    def allow_runs_until(self, last_run: int) -> None:
        """Allows runs again, until `last_run` runs have been made since the start of the process."""
        with self._changed:
            self._last, self._is_held = last_run, False
            self._changed.notify_all()

    @property
    def is_due(self) -> bool:
        """Whether the last allowed run has been made; for use between two runs."""
        return self._last is not None and self._begun >= self._last

    def exit_after_save(self, step: int | None) -> None:
        """Ends the process with exit code 75; to be called after the last save.

        Args:
          step: the global step that was reached; None if the graph has no global step.
        """
        if self._send is not None:
            self._send({"stopped_after": step})
        raise SystemExit(STOPPED_EXIT_CODE)

    def kill_own_process(self) -> None:
        """Kills this process and its children.

        A signal handler would have to wait until a call into TensorFlow returns.
        """
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def _report_handling(self, can_stop_after_step: bool) -> None:
        if self._send is not None:
            self._send({"can_stop_after_step": can_stop_after_step})

    def _on_sigterm(self, number, frame) -> None:
        """Handles the first SIGTERM; a second one ends the process."""
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() != self._owner or not self._open_blocks:  # a child that the script has forked, or no training
            os.kill(os.getpid(), number)
        elif self._send is None:
            self.allow_runs_until(self._begun)
        else:
            self._send({"received_signal": "SIGTERM"})


class WholeUpdates:
    """A wait for a batch after which no update is incomplete, to save or to end a training there.

    Lists of variables that are trained in turn can have windows of accumulation that never end in the same batch. So
    the wait ends after 1000 batches; a checkpoint has the sums of incomplete windows, too.
    """

    def __init__(self):
        self._waited = 0

    def is_waiting(self, batch_counters: Sequence[Any]) -> bool:
        """Returns whether to continue, after a batch at which the training could be saved or ended.

        Args:
          batch_counters: the number of accumulated batches for each incomplete update.
        """
        self._waited = self._waited + 1 if any(map(int, batch_counters)) else 0
        return 0 < self._waited <= _MOST_BATCHES_TO_WAIT


_OF_THIS_PROCESS = StopRequest()


def stop_request_of_process() -> StopRequest:
    """Returns the request object of this process."""
    return _OF_THIS_PROCESS
