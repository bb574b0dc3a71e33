"""Defines `global_options()`: the options of this process, and their effects in this package."""

from __future__ import annotations

import functools
import logging
from typing import Any

from npu_bridge.base.errors import say_once
from npu_bridge.options import OPTIONS, TrainingOptions
from npu_bridge.options.reading import read_option_keywords
from npu_bridge.options.rules import DEFAULT_PROFILING_OPTIONS
from npu_device.configs.option_tree import Leaf, OptionTree

__all__ = ["NpuConfig", "global_options"]

_SWITCH = (True, False)
_ON, _OFF, _ANY = Leaf(True, _SWITCH), Leaf(False, _SWITCH), Leaf()
_IMPLEMENTATIONS = ("high_performance", "high_precision")
_DECLARED: dict[str, Any] = {
    "graph_run_mode": Leaf(1, (0, 1)),
    "precision_mode": Leaf(None, OPTIONS["precision_mode"].kind.choices),
    "precision_mode_v2": Leaf(None, OPTIONS["precision_mode_v2"].kind.choices),
    "op_compiler_cache_mode": Leaf("enable", ("enable", "disable", "force")),
    "ac_parallel_enable": Leaf(None, ("0", "1")),
    "quant_dumpable": Leaf(None, ("0", "1")),
    "hcom_parallel": _ON,
    "is_tailing_optimization": _OFF,
    "enable_small_channel": _OFF,
    "external_weight": _OFF,
    "compile_dynamic_mode": _OFF,
    "input_batch_cpy": _OFF,
    "all_tensor_not_empty": _OFF,
    "oo_constant_folding": _ON,
    "enable_exception_dump": Leaf(2, (0, 1, 2)),
    "export_compile_stat": Leaf(1, (0, 1, 2)),
    "deterministic": Leaf(0, (0, 1)),
    "overflow_flag": Leaf(1, (0, 1)),
    "topo_sorting_mode": Leaf(None, (0, 1, None)),
    "jit_compile": Leaf("auto", ("true", "false", "auto")),
    "shape_generalization_mode": Leaf("STRICT", ("STRICT", "FULL", "ADAPTIVE")),
    "oo_level": Leaf("O3", ("O0", "O1", "O2", "O3")),
    "stream_sync_timeout": Leaf(-1),
    "event_sync_timeout": Leaf(-1),
    "execute_times": Leaf(-1),
    "input_fusion_size": Leaf(131072),
    **dict.fromkeys(
        (
            "graph_memory_max_size",
            "variable_memory_max_size",
            "enable_scope_fusion_passes",
            "fusion_switch_file",
            "op_compiler_cache_dir",
            "stream_max_parallel_num",
            "hcom_multi_mode",
            "op_debug_config",
            "debug_dir",
            "modify_mixlist",
            "op_precision_mode",
            "graph_exec_timeout",
            "customize_dtypes",
            "graph_compiler_cache_dir",
            "aicore_num",
            "auto_multistream_parallel_mode",
            "optimization_switch",
        ),
        _ANY,
    ),
    "auto_tune_mode": _ANY,
    "variable_format_optimize": Leaf(None, _SWITCH),
    "op_select_implmode": Leaf(None, _IMPLEMENTATIONS),
    "optypelist_for_implmode": _ANY,
    "op_debug_level": Leaf(None, (0, 1, 2, 3, 4)),
    "dump_config": {
        "enable_dump": _OFF,
        "dump_path": _ANY,
        "dump_step": _ANY,
        "dump_mode": Leaf("output", ("input", "output", "all")),
        "enable_dump_debug": _OFF,
        "dump_debug_mode": Leaf("all", ("aicore_overflow", "atomic_overflow", "all")),
        "dump_data": Leaf("tensor", ("tensor", "stats")),
        "dump_layer": _ANY,
    },
    "profiling_config": {
        "enable_profiling": _OFF,
        "profiling_options": Leaf(DEFAULT_PROFILING_OPTIONS),
    },
    "aoe_config": {"aoe_mode": Leaf(None, ("1", "2", "4")), "work_path": Leaf("./"), "aoe_config_file": _ANY},
    "memory_config": {
        "atomic_clean_policy": Leaf(0, (0, 1)),
        "static_memory_policy": Leaf(0, (0, 1, 2, 3, 4)),
        "variable_use_1g_huge_page": Leaf(0, (0, 1, 2)),
    },
    "experimental": {
        "multi_branches_config": {
            "input_shape": _ANY,
            "dynamic_node_type": Leaf(None, ("0", "1")),
            "dynamic_dims": _ANY,
        },
        "logical_device_deploy_config": {"deploy_mode": Leaf("LB", ("LB", "SINGLE")), "logical_device_id": _ANY},
        "model_deploy_config": {"model_deploy_mode": _ANY, "model_deploy_devicelist": _ANY},
        "graph_memory_optimize_config": {
            "recompute": Leaf(None, ("auto", "manual")),
            "graph_slice": Leaf(None, ("auto",)),
        },
        "resource_config_path": _ANY,
        "graph_parallel_option_path": _ANY,
        "enable_graph_parallel": _OFF,
    },
}
_DEPRECATED = {
    "auto_tune_mode": "Leave it out; aoe_config took its place.",
    "variable_format_optimize": "Leave it out.",
    "op_select_implmode": "Leave it out; op_precision_mode took its place.",
    "optypelist_for_implmode": "Leave it out; op_precision_mode took its place.",
    "op_debug_level": "Leave it out; op_debug_config took its place.",
}
# Options that have their documented effect here; all others are checked and kept.
WORKING = ("precision_mode", "precision_mode_v2", "modify_mixlist", "customize_dtypes", "deterministic")


class NpuConfig(OptionTree):
    """The options of a process as attributes: `precision_mode`, `dump_config.dump_path`, and so on.

    `WORKING` lists the options with an effect in this package; all other options are checked and kept without effect.

    Raises:
      ValueError: a script sets an attribute that is not an option, or an option to a value that is not allowed.
      TypeError: a script sets an option to a value of the wrong type.
    """

    def __init__(self):
        super().__init__("npu_device.global_options()", _DECLARED, _DEPRECATED)

    def training_options(self) -> TrainingOptions:
        """Converts the options to options of a training; logs once which changed options have no effect here.

        Raises:
          TypeError, ValueError: an option has a value that cannot be honoured, or two options contradict each other.
        """
        changed = self.changed_options()
        idle = sorted(changed.keys() - set(WORKING))
        if idle:
            text = f"npu_device: kept without an effect on TensorFlow's devices: {', '.join(idle)}."
            say_once(logging.INFO, text)
        asked = {name: value for name, value in changed.items() if name in WORKING and value != ""}
        return read_option_keywords("npu_device.global_options()", asked)


@functools.cache
def global_options() -> NpuConfig:
    """Returns the options of this process, the same object at each call. Set options before `npu_device.open()`."""
    return NpuConfig()
