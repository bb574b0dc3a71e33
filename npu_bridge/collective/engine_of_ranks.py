"""Chooses what several ranks exchange tensors with: Horovod, or TensorFlow's own collective operators.

Nothing here loads TensorFlow, so the launcher can ask.
"""

from __future__ import annotations

import functools
import importlib.util

from npu_bridge.base import environment
from npu_bridge.base.install import FIX_HOROVOD


def engine() -> str:
    """Returns what several ranks exchange tensors with: "horovod", or "tensorflow" for TensorFlow's own operators.

    It is the engine that `NPU_COLLECTIVES` names, else Horovod if it is installed.

    Raises:
      ValueError: the variable has another value.
    """
    return environment.collectives() or ("horovod" if _has_horovod() else "tensorflow")


@functools.cache
def _has_horovod():
    return importlib.util.find_spec("horovod") is not None


def line_at_start() -> str:
    """Returns a sentence about the engine for the start of a job; "" for Horovod, which users expect."""
    if engine() == "horovod":
        return ""
    way = "leave out --collectives" if _has_horovod() else f"install it: {FIX_HOROVOD}"
    return f"tensors go through TensorFlow's own collectives. For several hosts, use Horovod ({way})"


def refusal(is_on_one_machine: bool, is_elastic: bool, got: str = "") -> str:
    """Returns why the engine cannot serve a job, with the cure; "" if it can.

    Args:
      got: another reason why TensorFlow's own operators cannot.
    """
    if engine() == "horovod" or (is_on_one_machine and not is_elastic and not got):
        return ""
    got = got or ("an elastic job" if is_elastic else "ranks on several hosts, or tasks of a cluster")
    fix = "leave out --collectives and NPU_COLLECTIVES" if _has_horovod() else f"install Horovod: {FIX_HOROVOD}"
    return (
        f"TensorFlow's own collectives cannot run this job. Expected ranks that npu-run -np N starts on one machine; "
        f"got {got}. To use Horovod, {fix}"
    )
