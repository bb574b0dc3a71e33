"""What a rank finds in its environment besides what the caller's holds."""

from __future__ import annotations

import os

__all__ = ["rank_defaults"]


def rank_defaults(size: int) -> dict[str, str]:
    """Environment variables that every rank gets where the caller's environment does not have them.

    The cores are shared out among the ranks; otherwise each would take all of them, and wait for the others.
    """
    # How the cores are used is nobody's business but the script's when it has them all.
    if size == 1:
        return {"TF_CPP_MIN_LOG_LEVEL": "1", "PYTHONUNBUFFERED": "1"}
    share = max(1, _cores() // size)
    return {
        "OMP_NUM_THREADS": str(share),
        "TF_NUM_INTRAOP_THREADS": str(share),
        # A collective that waits must not keep other ops from running.
        "TF_NUM_INTEROP_THREADS": str(max(2, share)),
        "TF_CPP_MIN_LOG_LEVEL": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
