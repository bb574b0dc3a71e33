"""Chooses the engine for collectives of several ranks: Horovod, or TensorFlow's own collective operators.

Does not load TensorFlow, so that the launcher can use it.
"""

from __future__ import annotations

import functools
import importlib.util

from npu_bridge.base import environment
from npu_bridge.base.install import FIX_HOROVOD


def choose_engine() -> str:
    """Returns the engine for collectives: "horovod", or "tensorflow" for TensorFlow's own collective operators.

    `NPU_COLLECTIVES` chooses the engine. By default it is Horovod if Horovod is installed.

    Raises:
      ValueError: the variable names no engine.
    """
    return environment.collective_engine() or ("horovod" if _has_horovod() else "tensorflow")


@functools.cache
def _has_horovod():
    return importlib.util.find_spec("horovod") is not None


def describe_engine() -> str:
    """Returns a sentence about the engine, to print at the start of a job; "" for Horovod, which users expect."""
    if choose_engine() == "horovod":
        return ""
    way = _advice_to_use_horovod()
    return f"tensors go through TensorFlow's own collectives. For faster small transfers, use Horovod ({way})"


def unsupported_job_reason(is_on_one_machine: bool, got: str = "") -> str:
    """Returns why the engine cannot run a job, with the cure; "" if it can.

    Args:
      got: a property of the job that TensorFlow's own operators do not support; "" for none.
    """
    if choose_engine() == "horovod":
        return ""
    if got:
        return (
            f"TensorFlow's own collectives cannot run this job. Expected ranks that npu-run -np N or -H starts; got "
            f"{got}. To use Horovod, {_advice_to_use_horovod()}"
        )
    if is_on_one_machine or environment.is_flag_on(environment.OPEN_PORTS):
        return ""
    return (
        f"TensorFlow's own collectives open ports that ask for no secret. Expected --allow-open-ports for several "
        f"hosts; got none. Add the option if you trust the network and all users of the hosts (docs/security.md). To "
        f"use Horovod instead, {_advice_to_use_horovod()}"
    )


def _advice_to_use_horovod():
    return "leave out --collectives and NPU_COLLECTIVES" if _has_horovod() else f"install it: {FIX_HOROVOD}"
