"""What a rank finds in its environment besides what the caller's holds."""

from __future__ import annotations

from npu_bridge._machine import usable_cores

__all__ = ["rank_defaults"]


def rank_defaults(size: int) -> dict[str, str]:
    """Environment variables that every rank gets where the caller's environment does not have them.

    The cores are shared out among the ranks; otherwise each would take all of them, and wait for the others.
    """
    # How the cores are used is nobody's business but the script's when it has them all.
    if size == 1:
        return {"TF_CPP_MIN_LOG_LEVEL": "1", "PYTHONUNBUFFERED": "1"}
    share = max(1, usable_cores() // size)
    return {
        "OMP_NUM_THREADS": str(share),
        "TF_NUM_INTRAOP_THREADS": str(share),
        # A collective that waits must not keep other ops from running.
        "TF_NUM_INTEROP_THREADS": str(max(2, share)),
        "TF_CPP_MIN_LOG_LEVEL": "1",
        "PYTHONUNBUFFERED": "1",
    }
