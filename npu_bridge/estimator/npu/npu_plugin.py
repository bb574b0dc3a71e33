"""Provides functions of the process: its resources, its arithmetic, and memory that other servers reach."""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from npu_bridge.base.errors import message, say_once
from npu_bridge.estimator.npu.checks import check_bool_type
from npu_bridge.operators.unavailable import unavailable_function
from npu_bridge.options import OPTIONS
from npu_bridge.options.reading import read_keywords

__all__ = [
    "get_rdma_cache",
    "get_var_addr_and_size",
    "init_rdma_pool",
    "is_inf_nan_enabled",
    "malloc_shared_memory",
    "npu_close",
    "npu_resource_init",
    "npu_resource_shutdown",
    "rdma_remote_init",
    "rdma_remote_register",
    "set_device_sat_mode",
]

_SATURATES, _HAS_INF_AND_NAN = 0, 1
_ONLY_BOOL = ("enable_profiling", "hcom_multi_mode", "oo_constant_folding", "input_batch_cpy")


def npu_resource_init(
    graph_run_mode: int = 1,
    op_debug_level: int = 0,
    enable_profiling: bool = False,
    profiling_options: str | None = None,
    precision_mode: str | None = None,
    enable_scope_fusion_passes: str | None = None,
    enable_exception_dump: int = 2,
    aoe_mode: str | None = None,
    work_path: str | None = None,
    op_compiler_cache_mode: str | None = None,
    op_compiler_cache_dir: str | None = None,
    debug_dir: str | None = None,
    hcom_multi_mode: bool = False,
    distribute_config: str | None = None,
    aoe_config_file: str | None = None,
    precision_mode_v2: str | None = None,
    export_compile_stat: int = 1,
    aicore_num: str | None = None,
    oo_constant_folding: bool = True,
    input_batch_cpy: bool = False,
    oo_level: str = "O3",
    optimization_switch: str | None = None,
) -> None:
    """Checks options for the process but does not apply them: give options to an `NPURunConfig` or to a session.

    The arguments are the options of these names, which `docs/options.md` describes.

    Raises:
      TypeError, ValueError: an option, or a combination of options, is illegal.
    """
    owner, given = "npu_resource_init", dict(locals())
    for name in _ONLY_BOOL:
        check_bool_type(given[name], f"{owner}: {name}")
    if enable_profiling and profiling_options is None:
        fix = 'Pass \'{"output": "profile"}\', for example.'
        expected = OPTIONS["profiling_options"].kind.expected
        raise ValueError(message(owner, "profiling_options is missing", expected, "None", fix))
    read_keywords(owner, given)
    for name, value in given.items():
        option = OPTIONS[name]
        if option.effect.level == "works" and value not in (None, option.default):
            fix = "Give it to an NPURunConfig or to a session."
            say_once(logging.WARNING, f"{owner}: {name}={value!r} is checked, but changes nothing here. {fix}")


def npu_resource_shutdown() -> None:
    """Does nothing, the counterpart of `npu_resource_init`: communication ends with the process."""


npu_close = npu_resource_shutdown


def set_device_sat_mode(mode: int) -> None:
    """Sets the result of an overflow on the device; here it is always Inf, as in IEEE 754.

    Args:
      mode: 1 for Inf and NaN; 0, the largest finite number, is kept with a warning.
    Raises:
      ValueError: `mode` is neither.
    """
    if mode not in (_SATURATES, _HAS_INF_AND_NAN):
        raise ValueError(message("set_device_sat_mode", "mode is unknown", "0 or 1", repr(mode), "Use 1."))
    if mode == _SATURATES:
        say_once(
            logging.WARNING, "set_device_sat_mode: 0 is kept but has no effect here; overflows give Inf, as with 1."
        )
    _arithmetic_of_this_process().mode = mode


def is_inf_nan_enabled() -> bool:
    """Returns True unless `set_device_sat_mode(0)` was called."""
    return _arithmetic_of_this_process().mode == _HAS_INF_AND_NAN


def get_rdma_cache(data_type: Any, shape: Sequence[int], name: str = "rdma_w") -> tf.Variable:
    """Creates a variable of zeros that is not trained."""
    return tf.Variable(tf.zeros(shape, data_type), trainable=False, name=name)


@functools.cache
def _arithmetic_of_this_process() -> types.SimpleNamespace:
    """Returns the mode of `set_device_sat_mode`, which applies to all graphs and sessions."""
    return types.SimpleNamespace(mode=_HAS_INF_AND_NAN)


def _of_addresses(name, alternative):
    return unavailable_function(f"npu_plugin.{name}", "an access to memory by its address", alternative)


_EXCHANGE = "Exchange tensors with hccl_ops.all_to_all_v or hccl_ops.broadcast."
malloc_shared_memory = _of_addresses("malloc_shared_memory", "Use a tf.Variable.")
get_var_addr_and_size = _of_addresses("get_var_addr_and_size", _EXCHANGE)
rdma_remote_init = _of_addresses("rdma_remote_init", _EXCHANGE)
rdma_remote_register = _of_addresses("rdma_remote_register", _EXCHANGE)
init_rdma_pool = _of_addresses("init_rdma_pool", "Leave it out.")
