"""Provides functions for the whole process: resources, overflow mode, and memory that other servers can access."""

from __future__ import annotations

import functools
import inspect
import logging
import types
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from npu_bridge.base.errors import message, say_once
from npu_bridge.estimator.npu.checks import check_bool_type
from npu_bridge.operators.unavailable import unavailable_function
from npu_bridge.options import OPTIONS
from npu_bridge.options.reading import read_option_keywords

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
    """Checks options but does not apply them; to apply options, give them to an `NPURunConfig` or to a session.

    Each argument is an option of the same name; `docs/options.md` describes the options.

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
    defaults = inspect.signature(npu_resource_init).parameters
    # Compared as text, so that True, which equals 1, is still checked.
    given = {name: value for name, value in given.items() if repr(value) != repr(defaults[name].default)}
    read_option_keywords(owner, given)
    for name, value in given.items():
        option = OPTIONS[name]
        if option.effect.level == "works" and value not in (None, option.default):
            fix = "Give this option to an NPURunConfig or to a session."
            say_once(logging.WARNING, f"{owner}: {name}={value!r} is checked, but changes nothing here. {fix}")


def npu_resource_shutdown() -> None:
    """Does nothing, because communication ends with the process; the counterpart of `npu_resource_init`."""


npu_close = npu_resource_shutdown


def set_device_sat_mode(mode: int) -> None:
    """Records the overflow mode of the device; has no effect here, where an overflow always gives Inf (IEEE 754).

    Args:
      mode: 1 for Inf and NaN; 0 for the largest finite number, which is recorded with a warning.
    Raises:
      ValueError: `mode` is neither 0 nor 1.
    """
    if mode not in (_SATURATES, _HAS_INF_AND_NAN):
        raise ValueError(message("set_device_sat_mode", "mode is unknown", "0 or 1", repr(mode), "Use 1."))
    if mode == _SATURATES:
        say_once(
            logging.WARNING, "set_device_sat_mode: mode 0 has no effect here; an overflow gives Inf, as with mode 1."
        )
    _overflow_mode().mode = mode


def is_inf_nan_enabled() -> bool:
    """Returns True unless `set_device_sat_mode(0)` was called."""
    return _overflow_mode().mode == _HAS_INF_AND_NAN


def get_rdma_cache(data_type: Any, shape: Sequence[int], name: str = "rdma_w") -> tf.Variable:
    """Returns a new variable of zeros that is not trained."""
    return tf.Variable(tf.zeros(shape, data_type), trainable=False, name=name)


@functools.cache
def _overflow_mode() -> types.SimpleNamespace:
    """Returns the object that holds the overflow mode of the process."""
    return types.SimpleNamespace(mode=_HAS_INF_AND_NAN)


def _unavailable_memory_function(name, alternative):
    return unavailable_function(f"npu_plugin.{name}", "an access to memory by its address", alternative)


_EXCHANGE = "Exchange tensors with hccl_ops.all_to_all_v or hccl_ops.broadcast."
malloc_shared_memory = _unavailable_memory_function("malloc_shared_memory", "Use a tf.Variable.")
get_var_addr_and_size = _unavailable_memory_function("get_var_addr_and_size", _EXCHANGE)
rdma_remote_init = _unavailable_memory_function("rdma_remote_init", _EXCHANGE)
rdma_remote_register = _unavailable_memory_function("rdma_remote_register", _EXCHANGE)
init_rdma_pool = _unavailable_memory_function("init_rdma_pool", "Leave the call out.")
