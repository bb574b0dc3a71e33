"""Holds the commands that install missing packages."""

import importlib.util
import sys

_OLDEST, _NEWEST = 15, 21  # of TensorFlow 2
_BESIDE_NUMPY_2 = 18  # the first minor version of TensorFlow 2 that works with numpy 2
TENSORFLOWS = f"2.{_OLDEST} to 2.{_NEWEST}"
# The version that is installed by default.
CHOSEN = f"2.{_OLDEST if sys.version_info < (3, 12) else _NEWEST}"  # the oldest one has no wheels for later Pythons
INSTALL_TENSORFLOW = f"Install it: pip install 'tensorflow-cpu=={CHOSEN}.*', or 'tensorflow=={CHOSEN}.*' for GPUs."
# Parts of TensorFlow until 2.15, now separate packages.
_APART = {"tensorflow_estimator": "tensorflow-estimator==2.15.*", "tf_keras": "tf-keras=={version}.*"}


def is_supported_tensorflow(version: str) -> bool:
    """Returns whether this package works with a version of TensorFlow, such as "2.18.1"."""
    major, minor, *_ = (*version.split("."), "0")
    return major == "2" and minor.isdigit() and _OLDEST <= int(minor) <= _NEWEST


def missing_packages(version: str) -> list[str]:
    """Returns the missing packages that TensorFlow 2.16 and later needs, as pip requirements."""
    missing = [name for name in _APART if importlib.util.find_spec(name) is None]
    return [_APART[name].format(version=".".join(version.split(".")[:2])) for name in missing]


def install_command(version: str) -> str:
    """Returns the command that installs the result of `missing_packages`; "" if no package is missing."""
    packages = missing_packages(version)
    # With its dependencies, tf-keras would install the package tensorflow over tensorflow-cpu.
    return f"pip install --no-deps {' '.join(packages)}" if packages else ""


def numpy_problem(tensorflow: str, numpy: str) -> str:
    """Returns why a version of TensorFlow does not work with a version of numpy, and the cure; "" if it works.

    Without this check, numpy prints forty lines about modules that were compiled for another version.
    """
    if (
        int(numpy.split(".")[0]) < 2
        or not is_supported_tensorflow(tensorflow)
        or int(tensorflow.split(".")[1]) >= _BESIDE_NUMPY_2
    ):
        return ""
    return (
        f"npu_bridge: numpy has an unsupported version. Expected a version before 2 for TensorFlow "
        f"{tensorflow}; got {numpy}. Install it: pip install 'numpy<2'."
    )


HOROVOD = "horovod==0.28.1"
# Builds Horovod for TensorFlow over Gloo, and for nothing else.
HOROVOD_CHOICES = {
    "HOROVOD_WITH_TENSORFLOW": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_WITHOUT_PYTORCH": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    # cmake 4 refuses the bundled Gloo, which asks for cmake 2.8 behaviour, without this setting.
    "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
}
# Horovod's build imports these but cannot fetch them, because it must see the installed TensorFlow.
HOROVOD_NEEDS = ("setuptools>=64,<81", "wheel", "cloudpickle", "packaging", "psutil", "pyyaml")
INSTALL_HOROVOD = (
    f"{' '.join(f'{name}={value}' for name, value in HOROVOD_CHOICES.items())} "
    f"pip install --no-build-isolation {HOROVOD}"
)
# The command for users: it installs Horovod, and keeps the wheel for the next time.
FIX_HOROVOD = "npu-run doctor --fix"
