"""Makes the doctor's sections about installed versions and this machine: cores, processor features, memory, GPUs."""

from __future__ import annotations

import platform
import sys

from npu_bridge.base.gpus import describe_gpus
from npu_bridge.base.install import CHOSEN, TENSORFLOWS, is_supported, missing_beside, numpy_problem
from npu_bridge.base.inventory import installed_version, machine_rows, version_rows
from npu_bridge.base.tf_internals import names
from npu_run.doctor.page import Problem, Section

_HOROVOD = "0.28.1"


def versions_section() -> tuple[Section, list[Problem]]:
    """Returns the versions of all packages involved, and a problem for each unsuitable one."""
    problems = []
    if not (3, 9) <= sys.version_info[:2] <= (3, 13):
        problems.append(Problem(f"Python {platform.python_version()} is not supported", "Use Python 3.9 to 3.13."))
    tensorflow, horovod = installed_version("tensorflow"), installed_version("horovod")
    if tensorflow and not is_supported(tensorflow):
        fix = f"pip install 'tensorflow=={CHOSEN}.*'"
        problems.append(Problem(f"tensorflow is {tensorflow}; made for {TENSORFLOWS}", fix, False))
    elif tensorflow and not names.HAS_ESTIMATORS and (command := missing_beside(tensorflow)):
        problems.append(Problem(f"TensorFlow {tensorflow} has no Estimator and no Keras 2 of its own", command))
    numpy = installed_version("numpy")
    if tensorflow and numpy and numpy_problem(tensorflow, numpy):
        problems.append(
            Problem(f"numpy is {numpy}; TensorFlow {tensorflow} is made for one before 2", "pip install 'numpy<2'")
        )
    if horovod and not f"{horovod}.".startswith(f"{_HOROVOD}."):
        fix = f"pip install 'horovod=={_HOROVOD}.*'"
        problems.append(Problem(f"horovod is {horovod}; made for {_HOROVOD}", fix, False))
    return Section("versions", version_rows(), "versions"), problems


def machine_section(gpus: list[str] | None, description: str | None = None) -> Section:
    """Returns the rows of `machine_rows`, and the ranks' GPUs if the machine has any."""
    shared_out = describe_gpus()
    rows = [("GPUs of ranks", shared_out)] if shared_out else []
    return Section("machine", machine_rows(gpus, description) + rows, "machine")
