"""Processor time of a rank's own threads, those of Horovod apart, to tell a rank that computes from one that waits.

A rank that waits in a collective uses a twentieth of a core all the same, because Horovod's own threads look for work
all the time. They can be told apart by a name: a thread gives its name to the threads it starts.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any, Callable

from npu_bridge.base.after_import import after_import
from npu_bridge.base.horovod_internals import BASICS_MODULE, change_init

__all__ = ["name_horovods_threads", "processor_secs"]

_NAME = "horovod"


def name_horovods_threads() -> None:
    """Lets the threads that Horovod starts have a name of their own; to be called before Horovod is imported."""

    def naming_threads(init: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(init)
        def init_with_named_threads(*arguments: Any, **settings: Any) -> Any:
            with _named():
                return init(*arguments, **settings)

        return init_with_named_threads

    after_import(BASICS_MODULE, lambda module: change_init(module, naming_threads))


def processor_secs() -> float | None:
    """Seconds of processor time of this process's threads, those of Horovod apart; None where nobody can tell."""
    ticks = 0
    try:
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                with open(f"/proc/self/task/{thread}/stat", encoding="utf-8", errors="replace") as file:
                    name, _, fields = file.read().partition("(")[2].rpartition(")")
                if name != _NAME:
                    user, system = fields.split()[11:13]
                    ticks += int(user) + int(system)
    except (OSError, ValueError):
        return None
    return ticks / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def _named() -> Iterator[None]:
    """Inside, this thread is called as Horovod's are to be; where the system has no such names, nothing happens."""
    path = "/proc/thread-self/comm"
    before = ""
    with contextlib.suppress(OSError), open(path, "r+", encoding="utf-8", errors="replace") as file:
        before = file.read().rstrip("\n")
        file.write(_NAME)
    try:
        yield
    finally:
        if before:
            with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
                file.write(before)
