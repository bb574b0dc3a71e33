"""The doctor's sections about installed versions and about this machine: cores, processor features, memory, GPUs."""

from __future__ import annotations

import platform
import sys

from npu_bridge.base.inventory import installed_version, machine_rows, version_rows
from npu_bridge.launch.doctor.page import Problem, Section

__all__ = ["machine_section", "versions_section"]

_EXPECTED = {"tensorflow": "2.15", "horovod": "0.28.1"}


def versions_section() -> tuple[Section, list[Problem]]:
    """Versions of everything that takes part, and those that do not fit."""
    problems = []
    if not (3, 9) <= sys.version_info[:2] <= (3, 11):
        problems.append(
            Problem(f"Python {platform.python_version()} is not supported", "Use Python 3.9, 3.10 or 3.11.")
        )
    for package, expected in _EXPECTED.items():
        found = installed_version(package)
        if found and not f"{found}.".startswith(f"{expected}."):
            problems.append(
                Problem(f"{package} is {found}; made for {expected}", f"pip install '{package}=={expected}.*'", False)
            )
    return Section("versions", version_rows(), "versions"), problems


def machine_section(gpus: list[str] | None, description: str | None = None) -> Section:
    """The rows of `machine_rows`."""
    return Section("machine", machine_rows(gpus, description), "machine")
