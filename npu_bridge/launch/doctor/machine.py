"""The doctor's sections about installed versions and about this machine: cores, processor features, memory, GPUs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys

from npu_bridge import __version__
from npu_bridge._machine import LOW_PRECISION_UNITS, cpu_description, cpu_features, usable_cores
from npu_bridge.launch.doctor.page import Problem, Section

__all__ = ["installed_version", "machine_section", "versions_section"]

# Names under which a package may be installed, the first one found counts.
_PACKAGES = {
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-intel", "tensorflow-macos", "tensorflow-rocm"),
    "keras": ("keras",),
    "estimator": ("tensorflow-estimator",),
    "addons": ("tensorflow-addons",),
    "horovod": ("horovod",),
    "numpy": ("numpy",),
    "protobuf": ("protobuf",),
}
_EXPECTED = {"tensorflow": "2.15", "horovod": "0.28.1"}
_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "amx_int8")


def installed_version(package: str) -> str | None:
    """Version of a package by what is installed, without importing it; None when it is not there."""
    for name in _PACKAGES[package]:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def versions_section() -> tuple[Section, list[Problem]]:
    """Versions of everything that takes part, and those that do not fit."""
    rows = [
        ("npu_bridge", __version__),
        ("python", f"{platform.python_version()} ({sys.executable})"),
        ("system", f"{platform.platform()}"),
    ]
    problems = []
    if not (3, 9) <= sys.version_info[:2] <= (3, 11):
        problems.append(
            Problem(f"Python {platform.python_version()} is not supported", "Use Python 3.9, 3.10 or 3.11.")
        )
    for package in _PACKAGES:
        found, expected = installed_version(package), _EXPECTED.get(package)
        rows.append((package, found or "not installed"))
        if found and expected and not f"{found}.".startswith(f"{expected}."):
            problems.append(
                Problem(f"{package} is {found}; made for {expected}", f"pip install '{package}=={expected}.*'", False)
            )
    return Section("versions", rows), problems


def machine_section(gpus: list[str] | None, description: str | None = None) -> Section:
    """Cores, processor features that decide precision, memory and GPUs.

    Args:
      gpus: what TensorFlow sees; None when it could not be asked.
      description: text about the processors, as Linux's `/proc/cpuinfo`; that of this machine by default.
    """
    rows = [("cores", f"{usable_cores()} usable of {os.cpu_count()}")]
    text = cpu_description() if description is None else description
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    rows.append(("processor", model.group(1) if model else platform.processor() or platform.machine()))
    features = cpu_features(text)
    if features is not None:
        rows += [(name.upper(), "yes" if name in features else "no") for name in _FEATURES]
        rows += [(dtype, _arithmetic(LOW_PRECISION_UNITS[dtype], features)) for dtype in ("bfloat16", "float16")]
    else:
        rows.append(("features", "unknown: the system does not list them"))
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        rows.append(("memory", f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"))
    rows.append(("GPUs", "unknown" if gpus is None else ", ".join(gpus) or "none"))
    return Section("machine", rows)


def _arithmetic(units: tuple[str, ...], features: frozenset[str]) -> str:
    found = [name.upper() for name in units if name in features]
    return f"in hardware ({', '.join(found)})" if found else "not in hardware: no faster than float32 here"
