"""Tells a rank that computes from one that waits, by its threads, those of Horovod apart.

A rank that waits in a collective uses a twentieth of a core all the same, because Horovod's own threads look for work
all the time. They can be told apart by a name: a thread gives its name to the threads it starts. Threads that Horovod's
start later, while they continue a step of TensorFlow, inherit the name but do not count as Horovod's.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import threading
import time
import types
from collections.abc import Iterator, Mapping
from typing import Any, Callable

from npu_bridge.base.after_import import after_import
from npu_bridge.base.held_folders import THREAD
from npu_bridge.base.horovod_internals import BASICS_MODULE, change_init

__all__ = ["is_blocked", "name_horovods_threads", "processor_secs"]

_NAME = "horovod"
_horovods: set[str] = set()  # numbers of the threads of that name which were there when Horovod had started
_TASKS = "/proc/self/task"
# Numbers of system calls, by processor: of a wait for another thread, and of the sleeps between Horovod's cycles.
_CALLS = {"x86_64": ("202", {"35", "230"}), "aarch64": ("98", {"101", "115"})}
# Where the address of a time limit stands behind the number of a wait.
_TIME_LIMIT = 4
# How often to look, and how often something may move meanwhile.
_LEAST_GLANCES, _MOST_GLANCES, _MOST_MOVES = 20, 300, 2
_GLANCE_SECS = 0.001
_FIRST_SWITCHES = 2


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
        for thread in os.listdir(_TASKS):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                name, _, fields = _read(thread, "stat").partition("(")[2].rpartition(")")
                if name != _NAME or thread not in _horovods:
                    user, system = fields.split()[11:13]
                    ticks += int(user) + int(system)
    except (OSError, ValueError):
        return None
    return ticks / os.sysconf("SC_CLK_TCK")


def is_blocked(frames: Mapping[int, types.FrameType], is_wait: Callable[[types.FrameType], bool]) -> bool:
    """Whether nothing in this process can go on by itself: every thread waits for another one, or for other ranks.

    A thread that sleeps, reads, writes or listens may go on, a thread of Python also one that waits with a time limit,
    and so may a child process. Nor is a process blocked while Horovod moves data: its threads sleep between cycles, and
    not during one. The calling thread does not count, nor does the one that renews locks on folders.

    Args:
      frames: the innermost frames of the threads that execute Python code, by `threading.get_ident()`.
      is_wait: whether a frame is one in which a thread waits for another one or for operators. TensorFlow also waits in
        destructors, up to a minute for the thread that tunes an iterator, and then goes on.
    Returns:
      False also where the system does not say in which system calls threads are.
    """
    wait, sleeps = _CALLS.get(platform.machine(), ("", set()))
    known = [thread for thread in threading.enumerate() if thread.ident in frames]
    if len(known) < len(frames):
        return False  # TensorFlow has called a function of Python, which may sleep
    of_python = {str(thread.native_id) for thread in known}
    judged = [thread for thread in known if thread.ident != threading.get_ident() and thread.name != THREAD]
    left_out = of_python.difference(str(thread.native_id) for thread in judged)
    if not all(is_wait(frames[thread.ident]) for thread in judged):
        return False

    def is_waiting(thread):
        call = _call(thread)
        if call[0] != wait:
            return call[0] in sleeps and thread not in of_python and _has_always_slept(thread)
        return thread not in of_python or call[_TIME_LIMIT] == "0x0"

    try:
        threads = [thread for thread in os.listdir(_TASKS) if thread not in left_out]
        horovods = _horovods.intersection(_threads_named(_NAME))
        others = set(threads).difference(horovods)
        if any(_read(thread, "children") for thread in threads):
            return False
        moves, is_seen_asleep = 0, False
        for glance in range(_MOST_GLANCES):
            moves += not all(map(is_waiting, others))
            # A thread that waits with a time limit looks around now and then.
            if moves > _MOST_MOVES:
                return False
            is_seen_asleep |= any(_call(thread)[0] in sleeps for thread in horovods)
            if is_seen_asleep and glance >= _LEAST_GLANCES:
                return True
            time.sleep(_GLANCE_SECS)
    except (OSError, IndexError, ValueError):
        pass
    return False


def _threads_named(name):
    found = set()
    for thread in os.listdir(_TASKS):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            found |= {thread} if _read(thread, "comm").rstrip() == name else set()
    return found


def _has_always_slept(thread):
    """Whether a thread has slept since it began, as one of TensorFlow 2.21 does that has something to do much later."""
    switches = _read(thread, "status").rpartition("\nvoluntary_ctxt_switches:")[2].split()[0]
    return int(switches) <= _FIRST_SWITCHES


def _call(thread):
    """The system call that a thread is in: its number and its arguments; "running" where it is in none."""
    return _read(thread, "syscall").split()


def _read(thread, name):
    with open(f"{_TASKS}/{thread}/{name}", encoding="utf-8", errors="replace") as file:
        return file.read()


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
        with contextlib.suppress(OSError):
            _horovods.update(_threads_named(_NAME))
