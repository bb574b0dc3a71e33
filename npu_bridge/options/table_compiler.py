"""Options of graph compilation, of its caches and tuning, and of dynamic shapes."""

from __future__ import annotations

import functools

from npu_bridge.options.grammar import parse_dynamic_dims, parse_input_shape
from npu_bridge.options.kinds import Boolean, Integer, Text
from npu_bridge.options.table import DYNAMIC_INPUT, REQUIRED, Option, recorded

_NOTHING_COMPILED = recorded("Nothing is compiled for a device.")
_ANY_SHAPE = recorded("TensorFlow takes inputs of any shape.")
_dynamic_input = functools.partial(Option, owner=DYNAMIC_INPUT)
_deprecated = functools.partial(Option, status="deprecated")

OPTIONS = (
    _deprecated(
        16,
        "variable_format_optimize",
        Boolean(),
        "Keep variables in the device's own layout.",
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
        "Tuning job: 1 subgraphs, 2 operators, 4 gradient splitting.",
        recorded("No tuning takes place."),
        variable="AOE_MODE",
    ),
    Option(
        33,
        "work_path",
        Text(says="an existing directory"),
        "Working directory of tuning; read only with aoe_mode, then ./ by default.",
        recorded("No tuning takes place."),
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
    Option(36, "fusion_switch_file", Text(says="the path of a JSON file"), "File switching single fusions on or off."),
    Option(
        39,
        "op_compiler_cache_mode",
        Text(("enable", "force", "disable"), enforced=False),
        "Use of the cache of compiled kernels.",
        _NOTHING_COMPILED,
    ),
    Option(
        40,
        "op_compiler_cache_dir",
        Text(says="a path"),
        "Directory of the cache of compiled kernels.",
        _NOTHING_COMPILED,
    ),
    _deprecated(43, "dynamic_input", Boolean(), "Inputs change their shape.", _ANY_SHAPE, absent=False),
    _deprecated(
        44,
        "dynamic_graph_execute_mode",
        Text(says="'dynamic_execute' or 'lazy_recompile'"),
        "How graphs with dynamic inputs run; read only when dynamic_input is True.",
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
        "Cluster file of tuning; read only with aoe_mode.",
        recorded("No tuning takes place."),
        needs="aoe_mode",
        status="undocumented",
    ),
    Option(
        64,
        "topo_sorting_mode",
        Integer(),
        "Order of the graph's nodes.",
        attribute="topo_sorting_mode",
        status="undocumented",
    ),
    Option(
        65,
        "aoe_config_file",
        Text(says="the path of a JSON file"),
        "File restricting tuning to some operators.",
        recorded("No tuning takes place."),
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
        "Treat every dimension of the inputs as unknown.",
        _ANY_SHAPE,
        absent=False,
    ),
    Option(
        80,
        "export_compile_stat",
        Integer(0, 2),
        "Write fusion_result.json: 0 never, 1 at exit, 2 after compiling.",
        _NOTHING_COMPILED,
        default=1,
        accepts_none=True,
        strict_slot="skip",
    ),
    Option(
        84,
        "shape_generalization_mode",
        Text(("STRICT", "FULL", "ADAPTIVE")),
        "How far shapes are generalised; read only with jit_compile='true' and compile_dynamic_mode=False.",
        _ANY_SHAPE,
        default="STRICT",
        accepts_none=True,
        strict_slot="error",
    ),
    Option(
        85,
        "all_tensor_not_empty",
        Boolean(),
        "Leave out the checks for empty tensors.",
        default=False,
        accepts_none=True,
    ),
    _dynamic_input(
        1,
        "input_shape",
        Text(parse=parse_input_shape, says="name:d,d,...;name:..., -1 for a dynamic dimension"),
        "Shapes of the inputs.",
        _ANY_SHAPE,
        default=REQUIRED,
    ),
    _dynamic_input(
        2,
        "dynamic_dims",
        Text(parse=parse_dynamic_dims, says="profiles separated by ';', each a comma list of dimensions"),
        "Values the dynamic dimensions take together.",
        _ANY_SHAPE,
        default=REQUIRED,
    ),
    _dynamic_input(
        3,
        "dynamic_node_type",
        Integer(0, 1),
        "Where inputs come from: 0 a dataset, 1 placeholders.",
        _ANY_SHAPE,
        default=REQUIRED,
        absent=-1,
    ),
    _dynamic_input(
        4,
        "compile_hybrid_mode",
        Integer(0, 1),
        "1 compiles dynamic and static profiles together; needs dynamic_node_type=1.",
        _ANY_SHAPE,
        default=REQUIRED,
    ),
)
