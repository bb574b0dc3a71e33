"""Defines the error of a job that cannot start."""

from __future__ import annotations

import threading


class LaunchError(RuntimeError):
    """An error for a job that cannot start as asked; the message is one sentence with the reason and the cure."""


def check_thread() -> None:
    """Refuses to start a job in a thread that gets no signals, which could then not stop it.

    Raises:
      LaunchError: this is not the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise LaunchError(
            f"a job is started in the thread {threading.current_thread().name!r}. Expected the main thread, which "
            f"alone gets the signals that stop a job. Start npu-run there, or as a process of its own."
        )
