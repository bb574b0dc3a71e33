"""Lists installed versions and the machine's hardware, without importing or starting anything."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys

from npu_bridge.base.machine import LOW_PRECISION_UNITS, cpu_description, cpu_features, usable_cores
from npu_bridge.base.version import __version__

# Names under which a package can be installed; the first one found counts.
PACKAGES = {
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-intel", "tensorflow-macos", "tensorflow-rocm"),
    "keras": ("keras",),
    "estimator": ("tensorflow-estimator",),
    "addons": ("tensorflow-addons",),
    "horovod": ("horovod",),
    "numpy": ("numpy",),
    "protobuf": ("protobuf",),
}
_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "amx_int8")


def installed_version(package: str) -> str | None:
    """Returns the version of a package; None if the package is not installed."""
    for name in PACKAGES[package]:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def version_rows() -> list[tuple[str, str]]:
    """Returns (name, version) pairs for all packages involved, Python and the system."""
    rows = [
        ("npu_bridge", __version__),
        ("python", f"{platform.python_version()} ({sys.executable})"),
        ("system", f"{platform.platform()}"),
    ]
    return rows + [(package, installed_version(package) or "not installed") for package in PACKAGES]


def machine_rows(gpus: list[str] | None, description: str | None = None) -> list[tuple[str, str]]:
    """Returns (name, value) pairs: cores, processor features for low precision, memory and GPUs.

    Args:
      gpus: the GPUs that TensorFlow sees; None if unknown.
      description: text about the processors, in the format of Linux's `/proc/cpuinfo`; by default from this machine.
    """
    rows = [("cores", f"{usable_cores()} usable of {os.cpu_count()}")]
    text = cpu_description() if description is None else description
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    rows.append(("processor", model.group(1) if model else platform.processor() or platform.machine()))
    features = cpu_features(text)
    if features is not None:
        rows += [(name.upper(), "yes" if name in features else "no") for name in _FEATURES]
        rows += [
            (dtype, _describe_cpu_units(LOW_PRECISION_UNITS[dtype], features)) for dtype in ("bfloat16", "float16")
        ]
    else:
        rows.append(("features", "unknown: the system does not list them"))
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        rows.append(("memory", f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"))
    rows.append(("GPUs", "unknown" if gpus is None else ", ".join(gpus) or "none"))
    return rows


def _describe_cpu_units(units: tuple[str, ...], features: frozenset[str]) -> str:
    found = [name.upper() for name in units if name in features]
    return f"in hardware ({', '.join(found)})" if found else "not in hardware: no faster than float32 here"
