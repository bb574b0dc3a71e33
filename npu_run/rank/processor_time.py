"""Distinguishes ranks that compute from ranks that wait, by their threads other than Horovod's.

A rank that waits in a collective still uses a twentieth of a core, because Horovod's own threads poll for work all the
time. Horovod's threads are recognised by name: a thread passes its name on to the threads that it starts. Threads that
Horovod's threads start later, to continue a step of TensorFlow, inherit the name but do not count as Horovod's.
"""

from __future__ import annotations

import contextlib
import os
import platform
import threading
import time
from collections.abc import Iterator, Mapping

from npu_bridge.base.after_import import call_after_import
from npu_bridge.base.held_folders import THREAD
from npu_bridge.base.horovod_internals import BASICS_MODULE, wrap_init

_NAME = "horovod"
_horovods: set[str] = set()  # numbers of the threads with that name that existed when Horovod had started
_TASKS = "/proc/self/task"
# System call numbers by processor: of a wait for another thread, and of the sleeps between Horovod's cycles.
_CALLS = {"x86_64": ("202", {"35", "230"}), "aarch64": ("98", {"101", "115"})}
# Position of the address of the time limit among the words of a wait; its number is the first.
_TIME_LIMIT = 4
# Fewest and most looks at the threads, and how many movements between looks are tolerated.
_LEAST_GLANCES, _MOST_GLANCES, _MOST_MOVES = 20, 300, 2
_GLANCE_SECS = 0.001
_FIRST_SWITCHES = 2


def name_horovods_threads() -> None:
    """Gives the threads that Horovod starts a special name; call it before Horovod is imported."""
    # As a decorator, the context manager is entered anew in each call.
    call_after_import(BASICS_MODULE, lambda module: wrap_init(module, _horovods_thread_name()))


def processor_secs() -> float | None:
    """Returns this process's processor time in seconds, without Horovod's threads; None if the system cannot tell."""
    ticks = 0
    try:
        for thread in os.listdir(_TASKS):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
                name, _, fields = _read_thread_file(thread, "stat").partition("(")[2].rpartition(")")
                if name != _NAME or thread not in _horovods:
                    user, system = fields.split()[11:13]
                    ticks += int(user) + int(system)
    except (OSError, ValueError):
        return None
    return ticks / os.sysconf("SC_CLK_TCK")


def is_process_blocked(waiting: Mapping[int, bool]) -> bool:
    """Returns whether no thread of this process can continue: every thread waits for another thread or for other ranks.

    A thread that sleeps, reads, writes or listens can continue. So can a Python thread that waits with a time limit,
    and a child process. A process is also not blocked while Horovod moves data: Horovod's threads sleep between cycles,
    but not during a cycle. The calling thread and the thread that renews locks on folders do not count.

    Args:
      waiting: whether each thread that executes Python code waits for another thread or for operators, by
        `threading.get_ident()`. TensorFlow also waits in destructors: up to a minute for the thread that tunes an
        iterator; then it continues.
    Returns:
      True if the process is blocked. False also if the system does not show the threads' system calls.
    """
    wait, sleeps = _CALLS.get(platform.machine(), ("", set()))
    known = [thread for thread in threading.enumerate() if thread.ident in waiting]
    if len(known) < len(waiting):
        return False  # TensorFlow has called a Python function, which might sleep
    of_python = {str(thread.native_id) for thread in known}
    judged = [thread for thread in known if thread.ident != threading.get_ident() and thread.name != THREAD]
    left_out = of_python.difference(str(thread.native_id) for thread in judged)
    if not all(waiting[thread.ident] for thread in judged):
        return False

    def is_waiting(thread):
        call = _system_call(thread)
        if call[0] != wait:
            return call[0] in sleeps and thread not in of_python and _has_always_slept(thread)
        return thread not in of_python or call[_TIME_LIMIT] == "0x0"

    try:
        threads = [thread for thread in os.listdir(_TASKS) if thread not in left_out]
        horovods = _horovods.intersection(_threads_named(_NAME))
        others = set(threads).difference(horovods)
        if any(_read_thread_file(thread, "children") for thread in threads):
            return False
        moves, is_seen_asleep = 0, False
        for glance in range(_MOST_GLANCES):
            moves += not all(map(is_waiting, others))
            # A thread that waits with a time limit wakes up now and then.
            if moves > _MOST_MOVES:
                return False
            is_seen_asleep |= any(_system_call(thread)[0] in sleeps for thread in horovods)
            if is_seen_asleep and glance >= _LEAST_GLANCES:
                return True
            time.sleep(_GLANCE_SECS)
    except (OSError, IndexError, ValueError):
        pass
    return False


def _threads_named(name):
    found = set()
    for thread in os.listdir(_TASKS):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            found |= {thread} if _read_thread_file(thread, "comm").rstrip() == name else set()
    return found


def _has_always_slept(thread):
    """Returns whether a thread has only slept so far. TensorFlow 2.21 has a thread whose work begins much later."""
    switches = _read_thread_file(thread, "status").rpartition("\nvoluntary_ctxt_switches:")[2].split()[0]
    return int(switches) <= _FIRST_SWITCHES


def _system_call(thread):
    """Returns the number and arguments of a thread's current system call; "running" if it is in no system call."""
    return _read_thread_file(thread, "syscall").split()


def _read_thread_file(thread, name):
    with open(f"{_TASKS}/{thread}/{name}", encoding="utf-8", errors="replace") as file:
        return file.read()


@contextlib.contextmanager
def _horovods_thread_name() -> Iterator[None]:
    """Gives this thread, during a block, the name of Horovod's threads, if the system has thread names."""
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
