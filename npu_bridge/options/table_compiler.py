"""Options of graph compilation, of its caches and tuning, and of dynamic shapes."""

from __future__ import annotations

import functools

from npu_bridge.options.grammar import parse_dynamic_dims, parse_input_shape
from npu_bridge.options.kinds import Boolean, Integer, Text
from npu_bridge.options.table import DYNAMIC_INPUT, REQUIRED, Option, recorded

_NOTHING_COMPILED = recorded("Nothing is compiled for a device.")
_ANY_SHAPE = recorded("TensorFlow accepts inputs of any shape.")
_dynamic_input = functools.partial(Option, owner=DYNAMIC_INPUT)
_deprecated = functools.partial(Option, status="deprecated")

OPTIONS = (
    _deprecated(
        16,
        "variable_format_optimize",
        Boolean(),
        "Store variables in the device's native data layout.",
        attribute="variable_format_optimize",
    ),
    Option(
        27,
        "enable_scope_fusion_passes",
        Text(says="comma-separated pass names"),
        "Scope fusion passes to enable.",
        attribute="enable_scope_fusion_passes",
    ),
    Option(
        32,
        "aoe_mode",
        Text(("1", "2", "4")),
        "Tuning mode. 1: subgraphs. 2: operators. 4: gradient splitting.",
        recorded("There is no tuning."),
        variable="AOE_MODE",
    ),
    Option(
        33,
        "work_path",
        Text(says="an existing directory"),
        "Working directory for tuning. Used only with aoe_mode; the default is then ./.",
        recorded("There is no tuning."),
        absent="./",
        needs="aoe_mode",
    ),
    Option(
        34,
        "buffer_optimize",
        Text(("l2_optimize", "off_optimize")),
        "Buffer optimisation for inference.",
        default="l2_optimize",
        accepts_none=True,
    ),
    Option(
        36, "fusion_switch_file", Text(says="the path of a JSON file"), "File that turns individual fusions on or off."
    ),
    Option(
        39,
        "op_compiler_cache_mode",
        Text(("enable", "force", "disable"), enforced=False),
        "Cache mode for compiled kernels.",
        _NOTHING_COMPILED,
    ),
    Option(
        40,
        "op_compiler_cache_dir",
        Text(says="a path"),
        "Cache directory for compiled kernels.",
        _NOTHING_COMPILED,
    ),
    _deprecated(43, "dynamic_input", Boolean(), "The input shapes vary.", _ANY_SHAPE, absent=False),
    _deprecated(
        44,
        "dynamic_graph_execute_mode",
        Text(says="'dynamic_execute' or 'lazy_recompile'"),
        "Execution mode of graphs with dynamic inputs. Used only with dynamic_input=True.",
        _ANY_SHAPE,
        default="dynamic_execute",
        accepts_none=True,
    ),
    _deprecated(
        45,
        "dynamic_inputs_shape_range",
        Text(says="getnext:[..],[..];data:[..]"),
        "Shape ranges of dynamic inputs.",
        _ANY_SHAPE,
    ),
    Option(
        51,
        "distribute_config",
        Text(says="a path"),
        "Cluster file for tuning. Used only with aoe_mode.",
        recorded("There is no tuning."),
        needs="aoe_mode",
        status="undocumented",
    ),
    Option(
        64,
        "topo_sorting_mode",
        Integer(),
        "Sorting mode for the nodes of the graph.",
        attribute="topo_sorting_mode",
        status="undocumented",
    ),
    Option(
        65,
        "aoe_config_file",
        Text(says="the path of a JSON file"),
        "File that limits tuning to some operators.",
        recorded("There is no tuning."),
        attribute="aoe_config_file",
    ),
    Option(
        73,
        "jit_compile",
        Text(("auto", "true", "false"), only_str=True),
        "When kernels are compiled.",
        _NOTHING_COMPILED,
        default="auto",
        strict_slot="error",
    ),
    Option(
        78,
        "compile_dynamic_mode",
        Boolean(),
        "Treat all input dimensions as unknown.",
        _ANY_SHAPE,
        absent=False,
    ),
    Option(
        80,
        "export_compile_stat",
        Integer(0, 2),
        "When to write fusion_result.json. 0: never. 1: at exit. 2: after compilation.",
        _NOTHING_COMPILED,
        default=1,
        accepts_none=True,
        strict_slot="skip",
    ),
    Option(
        84,
        "shape_generalization_mode",
        Text(("STRICT", "FULL", "ADAPTIVE")),
        "How far input shapes are generalised. Used only with jit_compile='true' and compile_dynamic_mode=False.",
        _ANY_SHAPE,
        default="STRICT",
        accepts_none=True,
        strict_slot="error",
    ),
    Option(
        85,
        "all_tensor_not_empty",
        Boolean(),
        "Skip the checks for empty tensors.",
        default=False,
        accepts_none=True,
    ),
    _dynamic_input(
        1,
        "input_shape",
        Text(parse=parse_input_shape, says="name:d,d,...;name:..., -1 for a dynamic dimension"),
        "Input shapes.",
        _ANY_SHAPE,
        default=REQUIRED,
    ),
    _dynamic_input(
        2,
        "dynamic_dims",
        Text(parse=parse_dynamic_dims, says="profiles separated by ';', each a comma list of dimensions"),
        "Profiles: the values of the dynamic dimensions that occur together.",
        _ANY_SHAPE,
        default=REQUIRED,
    ),
    _dynamic_input(
        3,
        "dynamic_node_type",
        Integer(0, 1),
        "Source of the inputs. 0: a dataset. 1: placeholders.",
        _ANY_SHAPE,
        default=REQUIRED,
        absent=-1,
    ),
    _dynamic_input(
        4,
        "compile_hybrid_mode",
        Integer(0, 1),
        "1: compile dynamic and static profiles together. Needs dynamic_node_type=1.",
        _ANY_SHAPE,
        default=REQUIRED,
    ),
)
