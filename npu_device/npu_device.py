"""Opens the device, makes it the default, and returns the rank and the number of ranks."""

from __future__ import annotations

import contextlib
import functools
import logging
import types
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base import environment
from npu_bridge.base.errors import message, say_once
from npu_bridge.estimator.helper import get_gen_ops
from npu_bridge.session import precision
from npu_bridge.session.devices import choose_float32_arithmetic, requested_devices, visible_gpus
from npu_device.configs.npu_config import global_options

__all__ = ["NpuDeviceHandle", "gen_npu_ops", "global_npu_ctx", "npu_compat_function", "open", "set_npu_loop_size"]

gen_npu_ops = get_gen_ops()
npu_compat_function = tf.function


class NpuDeviceHandle:
    """A handle of an opened device, which `open` returns.

    Attributes:
      workers_num: the number of ranks.
      worker_id: this process's rank, from 0.
    """

    def __init__(self, device_id: int, options: Any):
        ranks = collective.current()
        self.workers_num, self.worker_id = ranks.size, ranks.rank
        self._device_id = device_id
        self._options = options
        gpus = tf.config.list_physical_devices("GPU")
        self._gpus = (
            [gpus[number] for number in visible_gpus(requested_devices(options) or (device_id,), len(gpus))]
            if gpus
            else []
        )

    @property
    def device_id(self) -> int:
        """The ordinal with which the device was opened."""
        return self._device_id

    def name(self) -> str:
        """Returns TensorFlow's name of the device that computes: "...GPU:0" or "...CPU:0"."""
        return "/job:localhost/replica:0/task:0/device:" + ("GPU:0" if self._gpus else "CPU:0")

    def is_cluster_worker(self) -> bool:
        """Returns whether the job has other ranks."""
        return self.workers_num > 1

    def as_default(self) -> NpuDeviceHandle:
        """Applies the options to this process's further computations; calling it again has no effect.

        TensorFlow still chooses devices itself, but a process sees only the GPU of its rank. `precision_mode`
        applies to functions (`tf.function`, `model.fit`) that this thread calls; operators that run one by one keep
        their dtype.
        """
        if not _open_devices().is_default:
            choose_float32_arithmetic()
            if self._gpus:
                tf.config.set_visible_devices(self._gpus, "GPU")
            if self._options.deterministic == 1:
                tf.config.experimental.enable_op_determinism()
            if tf.compat.v1.executing_eagerly_outside_functions():
                precision.lower_functions(precision.Precision(self._options))
            _open_devices().is_default = True  # last, so that a call after an error applies the options
        return self

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Calls `as_default` at the start of a `with` block; the options stay in effect after the block."""
        self.as_default()
        yield


@functools.cache
def _open_devices() -> types.SimpleNamespace:
    """Returns an object with `handle` (the opened device, or None) and `is_default` (whether it is the default)."""
    return types.SimpleNamespace(handle=None, is_default=False)


def open(device_id: int | None = None) -> NpuDeviceHandle:  # noqa: A001 - the documented name
    """Opens the device: reads the options, and starts the communication between ranks.

    Args:
      device_id: ordinal of the device from 0; default: `ASCEND_DEVICE_ID` of the environment, else 0. On a machine with
        GPUs the ordinal selects a GPU, unless an option or the environment selects one.
    Returns:
      The handle of the device; further calls return the same handle.
    Raises:
      RuntimeError: another device is open, or the environment declares more ranks than were started.
      TypeError, ValueError: an option in `global_options()` cannot be honoured.
    Ranks: Horovod starts here unless it already runs.
    """
    opened = _open_devices()
    ordinal = environment.declared_device() if device_id is None else int(device_id)
    if opened.handle is not None:
        if opened.handle.device_id != ordinal:
            got, fix = f"device {ordinal}", "Open one device in a process; npu-run -np N starts N processes."
            problem = "another device is open"
            raise RuntimeError(message("npu_device.open", problem, f"device {opened.handle.device_id}", got, fix))
        return opened.handle
    options = global_options().training_options()
    opened.handle = NpuDeviceHandle(ordinal, options)
    global_options().freeze()
    return opened.handle


def global_npu_ctx() -> NpuDeviceHandle | None:
    """Returns the handle of the default device; None before `as_default` is called."""
    opened = _open_devices()
    return opened.handle if opened.is_default else None


def set_npu_loop_size(loop_size: int) -> None:
    """Checks the number of steps that a loop inside a `tf.function` makes at once; the number has no effect here.

    Raises:
      ValueError: `loop_size` is not an integer of at least 1.
    """
    if isinstance(loop_size, bool) or not isinstance(loop_size, int) or loop_size < 1:
        fix = "Pass 1 for single steps."
        raise ValueError(
            message(
                "set_npu_loop_size", "loop_size is not a number of steps", "an int of at least 1", repr(loop_size), fix
            )
        )
    if loop_size > 1:
        say_once(
            logging.INFO,
            f"npu_device.set_npu_loop_size({loop_size}) has no effect on loops in functions, which run as written.",
        )
