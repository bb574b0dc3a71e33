"""Binds each rank to a core, as if it had its own processor to compute and to send with."""

from __future__ import annotations

import contextlib
import os


def keep_rank_on_one_core(rank: int) -> None:
    """Binds every thread of this process to one core, and with them the threads that they start later.

    This includes Horovod's own thread, which would otherwise use the core of another rank while that rank waits. On
    separate hosts this is impossible.

    Args:
      rank: rank of this process; ranks share cores if there are more ranks than cores.
    """
    cores = sorted(os.sched_getaffinity(0))
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread), {cores[rank % len(cores)]})
