"""A core for each rank, as if it had a processor of its own to compute and to send with."""

from __future__ import annotations

import contextlib
import os


def keep_rank_on_one_core(rank: int) -> None:
    """Binds every thread of this process to one core, and with them what they start later.

    Horovod's own thread is one of them. Left free, it works on the core of another rank whenever that one waits, which
    no rank on a host of its own could do.

    Args:
      rank: of this process; ranks share cores when there are more of them.
    """
    cores = sorted(os.sched_getaffinity(0))
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread), {cores[rank % len(cores)]})
