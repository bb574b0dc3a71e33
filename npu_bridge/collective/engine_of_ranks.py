"""Chooses what several ranks exchange tensors with: Horovod, or TensorFlow's own collective operators.

Nothing here loads TensorFlow, so the launcher can ask.
"""

from __future__ import annotations

import functools
import importlib.util

from npu_bridge.base import environment


def engine() -> str:
    """Returns what several ranks exchange tensors with: "horovod", or "tensorflow" for TensorFlow's own operators.

    It is what `NPU_COLLECTIVES` says, else Horovod where it is installed.

    Raises:
      ValueError: the variable has another value.
    """
    return environment.collectives() or ("horovod" if _has_horovod() else "tensorflow")


@functools.cache
def _has_horovod():
    return importlib.util.find_spec("horovod") is not None


def prepare() -> None:
    """Does what a rank has to do before it loads TensorFlow, if several ranks need it.

    Raises:
      ValueError: as `engine`, or variables of the launcher contradict each other.
      NoServerError: TensorFlow's own operators cannot be used in this job.
    """
    launched = environment.launched()
    if launched is not None and launched.size > 1 and engine() == "tensorflow":
        from npu_bridge.collective import tensorflow_server

        tensorflow_server.of_this_process()
