"""Describes this machine: cores, low-precision units, memory of processes, and this package's files."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import pathlib
import re
import sys
import sysconfig

_CPU_DESCRIPTION = pathlib.Path("/proc/cpuinfo")

# Processor features that compute in a dtype, as Linux names them.
LOW_PRECISION_UNITS = {"float16": ("amx_fp16", "avx512_fp16"), "bfloat16": ("amx_bf16", "avx512_bf16")}

# The limit and the use of a control group's memory, in version 2 and in version 1.
_LIMITS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
_CACHED = re.compile(r"^(?:total_)?(?:in)?active_file (\d+)$", re.MULTILINE)
_ROOT = pathlib.Path("/")


def project_package_folders() -> list[str]:
    """Returns the folders of this distribution's packages, whose code belongs to no script."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return [os.path.join(root, name) for name in ("npu_bridge", "npu_run", "npu_device", "hccl", "tensorflow1_compat")]


def library_folders() -> list[str]:
    """Returns the folders of Python's own modules and of installed packages."""
    found = sysconfig.get_paths()
    return [found[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")]


@functools.cache
def _package_folders() -> tuple[str, ...]:
    return (*(os.path.join(path, "") for path in {*project_package_folders(), *library_folders()}), "<")


def is_installed_code(file: str) -> bool:
    """Returns whether Python code is from an installed package or was generated, and so not the script's own."""
    return file.startswith(_package_folders()) or "__autograph_generated_file" in file


def usable_cores() -> int:
    """Returns the number of cores this process can run on, which can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def peak_memory(process: int | None = None) -> int | None:
    """Returns the peak memory in bytes of this process, or another one of this machine; None if unknown."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open(f"/proc/{process or 'self'}/status", encoding="utf-8", errors="replace") as file:
            return int(file.read().partition("VmHWM:")[2].split()[0]) * 1024
    if process is not None:
        return None
    with contextlib.suppress(ImportError):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return None


def current_memory_bytes() -> int | None:
    """Returns the memory of this process in bytes; its peak if the system does not show the current value."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return peak_memory()


def available_memory_bytes() -> float:
    """Returns the bytes of memory that this process can still use; infinity if the system does not tell.

    The machine has a limit, and so have the control group of the job and the groups around it. Files that are only
    cached leave room.
    """
    found = [math.inf]
    with contextlib.suppress(OSError, ValueError, IndexError):
        found.append(int(_read(_ROOT / "proc/meminfo").partition("MemAvailable:")[2].split()[0]) * 1024)
    with contextlib.suppress(OSError, ValueError):
        for line in _read(_ROOT / "proc/self/cgroup").splitlines():
            _, kinds, path = line.split(":", 2)
            is_v1 = "memory" in kinds.split(",")
            if is_v1 or not kinds:
                top = _ROOT / "sys/fs/cgroup" / ("memory" if is_v1 else "")
                group = top / path.strip("/")
                for folder in (group, *group.parents)[: 1 + len(group.parts) - len(top.parts)]:
                    with contextlib.suppress(OSError, ValueError):  # no limit
                        limit, used = (int(_read(folder / name)) for name in _LIMITS[is_v1])
                        cached = _CACHED.findall(_read(folder / "memory.stat"))
                        found.append(limit - used + sum(map(int, cached[-2:])))
    return min(found)


def cpu_description() -> str:
    """Returns the system's text about its processors (Linux's `/proc/cpuinfo`); "" if it has none."""
    try:
        return _CPU_DESCRIPTION.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def cpu_features(description: str) -> frozenset[str] | None:
    """Returns the processor features listed in a result of `cpu_description`; None if the text has no list."""
    flags = re.search(r"^flags\s*:\s*(.+)$", description, re.MULTILINE)
    return frozenset(flags.group(1).split()) if flags else None


def missing_cpu_units(low_dtype: str, description: str | None = None) -> str | None:
    """Returns a clause that says which units for `low_dtype` a CPU lacks; None if the CPU has some, or is unknown.

    `description` is a text in the format of Linux's `/proc/cpuinfo`; by default from this machine.
    """
    features = cpu_features(cpu_description() if description is None else description)
    units = LOW_PRECISION_UNITS[low_dtype]
    if features is None or not features.isdisjoint(units):
        return None
    return f"this CPU has no {low_dtype} units ({' or '.join(units)})"


def _read(path: pathlib.Path) -> str:
    return path.read_text(encoding="utf-8")
