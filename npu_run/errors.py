"""Defines the error for a job that cannot start."""

from __future__ import annotations

import threading


class LaunchError(RuntimeError):
    """Raised if a job cannot start as requested; the message is one sentence with the reason and the cure."""


def check_is_main_thread() -> None:
    """Raises an error outside of the main thread, because only the main thread gets the signals that stop a job.

    Raises:
      LaunchError: this is not the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise LaunchError(
            f"a job is started in the thread {threading.current_thread().name!r}. Expected the main thread, which "
            f"alone gets the signals that stop a job. Start npu-run in the main thread, or as its own process."
        )
