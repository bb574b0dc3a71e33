"""Labels the threads of a process equally on all ranks, as trainings in threads have names of their own."""

from __future__ import annotations

import collections
import re
import threading
from multiprocessing.dummy import DummyProcess
from typing import Any

from npu_bridge.base import environment
from npu_bridge.base.errors import message

# Python's default name of a thread: its number, and from Python 3.10 on the name of its function.
_UNNAMED = re.compile(r"Thread-(\d+)(.*)")
# The name of a worker of a `ThreadPoolExecutor`, which begins with the name of the pool.
_WORKER = re.compile(r"(ThreadPoolExecutor-\d+)_\d+")
# Numbers of the threads seen so far, by their function.
_threads: collections.defaultdict[str, set[int]] = collections.defaultdict(set)
# The worker of each pool that made the pool's first training.
_training_workers: dict[Any, threading.Thread] = {}
_lock = threading.Lock()


def thread_label() -> str:
    """Returns a text that identifies the calling thread, equal on all ranks; "" for the main thread.

    Python numbers threads without a name, and one rank can have started more threads than another. So such a thread is
    identified by its position among the threads that ran the same function.
    """
    thread = threading.current_thread()
    if thread is threading.main_thread():
        return ""
    name = thread.name
    _check_only_worker_that_trains(thread)
    unnamed = _UNNAMED.fullmatch(name)
    if unnamed:
        with _lock:
            for other in filter(None, (_UNNAMED.fullmatch(each.name) for each in threading.enumerate())):
                _threads[other[2]].add(int(other[1]))
            name = f"{sorted(_threads[unnamed[2]]).index(int(unnamed[1]))}{unnamed[2]}"
    return "-" + re.sub(r"\W", "_", name, flags=re.ASCII)


def _check_only_worker_that_trains(thread):
    """Raises an error if two workers of a pool make trainings: idle workers take them in another order on each rank."""
    worker, launched = _WORKER.fullmatch(thread.name), environment.launcher_placement()
    # Workers of one `ThreadPool` share the queue of its tasks.
    pool = vars(thread)["_args"][0] if isinstance(thread, DummyProcess) else worker and worker[1]
    if pool is None or launched is None or launched.size == 1:
        return
    with _lock:
        first = _training_workers.get(pool)
        if first is None or not first.is_alive():
            first = _training_workers[pool] = thread
    if first is not thread:
        problem = "workers of a pool take trainings in any order, so ranks can average gradients of different models"
        expected, fix = "a thread for each training", "Write threading.Thread(target=train, name=name_of_the_model)."
        raise RuntimeError(message("npu_bridge.collective", problem, expected, f"{first.name}, {thread.name}", fix))
