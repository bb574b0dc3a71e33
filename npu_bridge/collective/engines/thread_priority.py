"""Gives Horovod's threads real-time priority over computing threads, on request and if permitted.

A rank with one or two cores communicates and computes on the same cores. Linux gives all threads equal shares, so
arrived gradients wait some milliseconds until they are summed and sent on, and the network is idle meanwhile. With
real-time priority the gradients do not wait. Under MPI nothing is changed, because its threads wait without sleeping.

Two threads of Gloo also wait for each other without sleeping: the receiver for a lock, in a loop around `epoll_wait`,
and the sender for the end of a message, in a loop around `sched_yield`. So both threads get the same priority and take
turns. If the receiver could not be interrupted, the sender would never release the lock on that core.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from npu_bridge.base import environment
from npu_bridge.collective.rendezvous.key_value_store import KeyValueStore

_TASKS = "/proc/self/task"
_LOWEST_REAL_TIME = 1
_noted: set[int] = set()  # state of the process, like Horovod


@contextlib.contextmanager
def give_new_threads_real_time_priority() -> Iterator[None]:
    """Gives threads that start inside the block real-time priority; Horovod must be started inside it.

    Does nothing without `NPU_COMMUNICATION_PRIORITY=1`, under MPI, and if the process lacks the permission
    (CAP_SYS_NICE, or a limit of real-time priorities above 0).

    Raises:
      ValueError: the variable is neither 0 nor 1.
    """
    is_wanted = environment.are_horovod_threads_preferred() and KeyValueStore("start").exists
    before = _list_thread_ids()
    yield
    _noted.clear()
    if is_wanted:
        _noted.update(_list_thread_ids() - before)
        set_real_time(True)


def set_real_time(is_real_time: bool) -> bool:
    """Gives the threads noted by `give_new_threads_real_time_priority` real-time priority, or normal priority again.

    Returns:
      Whether there are such threads, and the system has permitted the change.
    """
    if not _noted:
        return False
    policy, priority = (os.SCHED_RR, _LOWEST_REAL_TIME) if is_real_time else (os.SCHED_OTHER, 0)
    for thread in _noted:
        try:
            os.sched_setscheduler(thread, policy | os.SCHED_RESET_ON_FORK, os.sched_param(priority))
        except PermissionError:
            return False
        except OSError:  # the thread has ended
            continue
    return True


def _list_thread_ids() -> set[int]:
    """Returns this process's threads; empty if the system does not list them as Linux does."""
    with contextlib.suppress(OSError):
        return set(map(int, os.listdir(_TASKS)))
    return set()
