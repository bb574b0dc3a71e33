"""Whether this machine's CPU has units for a low precision."""

from __future__ import annotations

import pathlib

_CPU_DESCRIPTION = pathlib.Path("/proc/cpuinfo")
_UNITS = {"float16": ("amx_fp16", "avx512_fp16"), "bfloat16": ("amx_bf16", "avx512_bf16")}


def missing_units(low_dtype: str, description: str | None = None) -> str | None:
    """Why a CPU computes no faster in a low precision.

    Args:
      low_dtype: "float16" or "bfloat16".
      description: text as in Linux's `/proc/cpuinfo`; by default that of this machine.
    Returns:
      The reason as a clause, or None when the CPU has such units or nothing is known about it.
    """
    if description is None:
        try:
            description = _CPU_DESCRIPTION.read_text()
        except OSError:
            return None
    flags = next((line.split() for line in description.splitlines() if line.startswith("flags")), None)
    if flags is None or any(unit in flags for unit in _UNITS[low_dtype]):
        return None
    return f"this CPU has no {low_dtype} units ({' or '.join(_UNITS[low_dtype])})"
