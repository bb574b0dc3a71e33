"""Chooses the devices that a session of this rank uses, and the device of the session's variables."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from npu_bridge.base import environment
from npu_bridge.base.errors import say_once
from npu_bridge.graph.variables import VARIABLE_TYPES
from npu_bridge.options import TrainingOptions
from npu_bridge.options.grammar import parse_device_list
from npu_bridge.options.rank_table import read_rank_table

_HOST = "/device:CPU:0"


def choose_devices(options: TrainingOptions, session_config: Any) -> None:
    """Makes only the GPUs that options or the environment name visible in a ConfigProto; does nothing without a GPU.

    A `visible_device_list` that the script has set stays.

    Raises:
      ValueError: the rank table, or one of these environment variables, is malformed.
    """
    choose_float32_arithmetic()
    if session_config.gpu_options.visible_device_list:
        return
    gpu_count = len(tf.config.list_physical_devices("GPU"))
    if gpu_count:
        visible = visible_gpus(requested_devices(options), gpu_count)
        session_config.gpu_options.visible_device_list = ",".join(map(str, visible))


def choose_float32_arithmetic() -> None:
    """Allows or forbids TF32 in this process, as `ENABLE_HF32_EXECUTION` says; does nothing if it is unset.

    Raises:
      ValueError: the variable is neither 0 nor 1.
    """
    allows_tf32 = environment.read_zero_or_one("ENABLE_HF32_EXECUTION", "for TensorFlow's default")
    if allows_tf32 is not None:
        tf.config.experimental.enable_tensor_float_32_execution(allows_tf32)


def provide_cpu_devices(strategy: Any, session_config: Any) -> None:
    """Gives a session a CPU device for each CPU replica of a strategy; with fewer devices, the session would hang."""
    if strategy is None:
        return
    devices = [tf.DeviceSpec.from_string(device) for device in strategy.extended.worker_devices]
    needed = max((1 + (device.device_index or 0) for device in devices if device.device_type == "CPU"), default=0)
    # Not `device_count["CPU"]`: a look-up creates the entry, and with 0 the session has no processor.
    if needed > max(1, session_config.device_count.get("CPU", 0)):
        session_config.device_count["CPU"] = needed


def requested_devices(options: TrainingOptions) -> tuple[int, ...]:
    """Returns the ordinals of the devices requested for this process; empty if no source names a device.

    The first source that names devices wins: `session_device_id`, `local_device_list`, the rank table,
    `ASCEND_DEVICE_ID`, `DEVICE_ID`, the launcher's local rank.

    Raises:
      ValueError: an environment variable or the rank table is malformed.
    """
    if options.session_device_id >= 0:
        return (options.session_device_id,)
    if options.local_device_list is not None:
        return tuple(parse_device_list(options.local_device_list))
    table = read_rank_table()
    if table is not None:
        return (table.own_placement().device,)
    if environment.read_variable("ASCEND_DEVICE_ID") or environment.read_variable("DEVICE_ID"):
        return (environment.declared_device(),)
    placed = environment.launcher_placement()
    return (placed.local_rank,) if placed is not None else ()


def visible_gpus(ordinals: Sequence[int], gpu_count: int) -> list[int]:
    """Returns the GPU numbers for device ordinals, in order of preference and without repetitions.

    An ordinal beyond the last GPU shares a GPU with others, with a warning. If the environment lists a single GPU, the
    launcher has chosen that GPU; every ordinal (a number among all GPUs of the machine) then means that GPU.
    """
    if gpu_count == 1 and len(environment.visible_gpus() or ()) == 1:
        return [0] if ordinals else []
    beyond = [ordinal for ordinal in ordinals if ordinal >= gpu_count]
    if beyond:
        say_once(
            logging.WARNING,
            f"session_device_id: this machine has fewer GPUs than devices were requested. Expected ordinals in "
            f"0..{gpu_count - 1}; got {beyond[0]}. This rank uses GPU {beyond[0] % gpu_count}, and shares it with "
            f"other ranks. Start fewer ranks on this machine to give each rank its own GPU.",
        )
    return list(dict.fromkeys(ordinal % gpu_count for ordinal in ordinals))


def variable_device(op: tf.Operation, device_of_others: Callable[[tf.Operation], Any] | None = None) -> Any:
    """Returns the device of an operator, for `tf.device`: the CPU for a variable.

    Any other operator gets the result of `device_of_others`; without this function, the device that is already set.
    """
    if op.type in VARIABLE_TYPES:
        return _HOST
    return op.device if device_of_others is None else device_of_others(op)


def check_placement(options: TrainingOptions, graph: tf.Graph) -> None:
    """Warns if `variable_placement` is "Host" but the graph already has variables on other devices."""
    if options.variable_placement != "Host":
        return
    elsewhere = [op.name for op in graph.get_operations() if op.type in VARIABLE_TYPES and "CPU" not in op.device]
    if elsewhere and tf.config.list_physical_devices("GPU"):
        say_once(
            logging.WARNING,
            f"variable_placement: the graph was built before the option was known. Expected variables on "
            f"{_HOST}; got {len(elsewhere)} on other devices, {elsewhere[0]!r} among them. Give the option to "
            f"NPURunConfig, or build the variables under tf.device({_HOST!r}).",
        )
