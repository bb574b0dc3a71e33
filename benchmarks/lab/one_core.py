"""Binds each rank to a core, as if it had its own processor to compute and to send with."""

from __future__ import annotations

import contextlib
import os


def keep_rank_on_one_core(rank: int) -> None:
    """Binds every thread of this process to one core, and with them the threads that they start later.

    This includes Horovod's own thread. Otherwise it would use the core of another rank whenever that rank waits, which
    is impossible on separate hosts.

    Args:
      rank: of this process; ranks share cores when there are more of them.
    """
    cores = sorted(os.sched_getaffinity(0))
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread), {cores[rank % len(cores)]})
