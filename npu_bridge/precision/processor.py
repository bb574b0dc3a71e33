"""Tells whether this CPU has instructions for float16 or bfloat16."""

from __future__ import annotations

from npu_bridge._machine import LOW_PRECISION_UNITS, cpu_description, cpu_features


def missing_units(low_dtype: str, description: str | None = None) -> str | None:
    """Why a CPU computes no faster in a low precision.

    Args:
      low_dtype: "float16" or "bfloat16".
      description: text as in Linux's `/proc/cpuinfo`; by default that of this machine.
    Returns:
      The reason as a clause, or None when the CPU has such units or nothing is known about it.
    """
    features = cpu_features(cpu_description() if description is None else description)
    units = LOW_PRECISION_UNITS[low_dtype]
    if features is None or not features.isdisjoint(units):
        return None
    return f"this CPU has no {low_dtype} units ({' or '.join(units)})"
