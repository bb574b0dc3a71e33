"""The documented facts about the helper config classes and the session keys, as plain data."""

from tests.documented.run_config_facts import NOT_BOOLEAN, NOT_INTEGER, NOT_TEXT

REQUIRED = object()

# class -> (name, default, attribute) in positional order.
HELPER_PARAMETERS = {
    "ProfilingConfig": [
        ("enable_profiling", False, "_enable_profiling"),
        ("profiling_options", None, "_profiling_options"),
    ],
    "DumpConfig": [
        ("enable_dump", False, "_enable_dump"),
        ("dump_path", None, "_dump_path"),
        ("dump_step", None, "_dump_step"),
        ("dump_mode", "output", "_dump_mode"),
        ("enable_dump_debug", False, "_enable_dump_debug"),
        ("dump_debug_mode", "all", "_dump_debug_mode"),
        ("dump_data", "tensor", "dump_data"),
        ("dump_layer", None, "dump_layer"),
    ],
    "MemoryConfig": [
        ("atomic_clean_policy", 0, "_atomic_clean_policy"),
        ("static_memory_policy", 0, "_static_memory_policy"),
        ("memory_optimization_policy", None, "_memory_optimization_policy"),
        ("variable_use_1g_huge_page", 0, "_variable_use_1g_huge_page"),
    ],
    "DynamicInputConfig": [
        ("input_shape", REQUIRED, "_input_shape"),
        ("dynamic_dims", REQUIRED, "_dynamic_dims"),
        ("dynamic_node_type", REQUIRED, "_dynamic_node_type"),
        ("compile_hybrid_mode", REQUIRED, "_compile_hybrid_mode"),
    ],
    "GraphMemoryOptimizeConfig": [
        ("recompute", None, "_recompute"),
        ("graph_slice", None, "_graph_slice"),
    ],
    "ExperimentalConfig": [
        ("logical_device_cluster_deploy_mode", "LB", "_logical_device_cluster_deploy_mode"),
        ("logical_device_id", None, "_logical_device_id"),
        ("model_deploy_mode", None, "_model_deploy_mode"),
        ("model_deploy_devicelist", None, "_model_deploy_devicelist"),
        ("graph_memory_optimize_config", None, "_graph_memory_optimize_config"),
        ("enable_graph_parallel", None, "_enable_graph_parallel"),
        ("graph_parallel_option_path", None, "_graph_parallel_option_path"),
        ("graph_compiler_cache_dir", None, "_graph_compiler_cache_dir"),
        ("resource_config_path", None, "_resource_config_path"),
        ("accelerate_train_mode", None, "_accelerate_train_mode"),
    ],
}


def _keys(slot, absent, is_sent, names):
    """Rows of keys that are called as their options."""
    return [(key, slot, absent, key, is_sent) for key in names.split()]


# key, AttrValue field, value assumed when the key is missing, option name where it differs from the key,
# whether NPURunConfig() with all defaults writes it.
SESSION_KEYS = [
    *_keys("b", True, True, "use_off_line hcom_parallel oo_constant_folding min_group_size"),
    *_keys("i", 1, True, "graph_run_mode iterations_per_loop graph_max_parallel_model_num export_compile_stat"),
    *_keys(
        "b",
        False,
        True,
        "mix_compile_mode enable_data_pre_proc enable_reduce_precision enable_dump enable_dump_debug "
        "hcom_multi_mode is_tailing_optimization frozen_variable external_weight input_batch_cpy "
        "all_tensor_not_empty enable_compress_weight",
    ),
    *_keys(
        "s",
        None,
        False,
        "in_out_pair precision_mode precision_mode_v2 modify_mixlist customize_dtypes op_precision_mode "
        "op_select_implmode optypelist_for_implmode profiling_options dump_path dump_step dump_layer "
        "quant_dumpable fusion_switch_file enable_scope_fusion_passes stream_max_parallel_num "
        "memory_optimization_policy input_shape dynamic_dims ac_parallel_enable op_debug_config debug_dir "
        "op_compiler_cache_mode op_compiler_cache_dir aicore_num optimization_switch aoe_mode "
        "distribute_config aoe_config_file auto_tune_mode local_device_list HCCL_algorithm "
        "auto_multistream_parallel_mode graph_compiler_cache_dir graph_slice resource_config_path "
        "graph_parallel_option_path dynamic_inputs_shape_range graph_memory_max_size variable_memory_max_size "
        "compress_weight_conf soc_config insert_op_file const_input",
    ),
    *_keys(
        "i",
        None,
        False,
        "compile_hybrid_mode op_debug_level topo_sorting_mode hccl_timeout op_wait_timeout op_execute_timeout",
    ),
    *_keys("b", False, False, "compile_dynamic_mode enable_graph_parallel dynamic_input lower_functional_ops"),
    ("session_device_id", "i", -1, "session_device_id", False),
    ("deterministic", "i", 0, "deterministic", True),
    ("in_out_pair_flag", "b", True, "in_out_pair_flag", False),
    ("profiling_mode", "b", False, "enable_profiling", False),
    ("dump_mode", "s", "output", "dump_mode", False),
    ("dump_debug_mode", "s", "all", "dump_debug_mode", False),
    ("dump_data", "s", "tensor", "dump_data", False),
    ("buffer_optimize", "s", "l2_optimize", "buffer_optimize", True),
    ("enable_small_channel", "i", 0, "enable_small_channel", True),
    ("variable_placement", "s", "Device", "variable_placement", True),
    ("atomic_clean_policy", "i", 0, "atomic_clean_policy", False),
    ("static_memory_policy", "i", 0, "static_memory_policy", False),
    ("variable_use_1g_huge_page", "i", 0, "variable_use_1g_huge_page", False),
    ("input_fusion_size", "i", 131072, "input_fusion_size", True),
    ("dynamic_node_type", "i", -1, "dynamic_node_type", False),
    ("enable_exception_dump", "i", 2, "enable_exception_dump", True),
    ("oo_level", "s", "O3", "oo_level", True),
    ("work_path", "s", "./", "work_path", False),
    ("local_rank_id", "i", -1, "local_rank_id", False),
    ("stream_sync_timeout", "i", -1, "stream_sync_timeout", True),
    ("event_sync_timeout", "i", -1, "event_sync_timeout", True),
    ("graph_exec_timeout", "i", 600000, "graph_exec_timeout", False),
    ("jit_compile", "s", "auto", "jit_compile", True),
    ("shape_generalization_mode", "s", "STRICT", "shape_generalization_mode", True),
    ("experimental_accelerate_train_mode", "s", None, "accelerate_train_mode", False),
    ("experimental_logical_device_cluster_deploy_mode", "s", "LB", "logical_device_cluster_deploy_mode", True),
    ("experimental_logical_device_id", "s", None, "logical_device_id", False),
    ("experimental_model_deploy_mode", "s", None, "model_deploy_mode", False),
    ("experimental_model_deploy_devicelist", "s", None, "model_deploy_devicelist", False),
    ("dynamic_graph_execute_mode", "s", "dynamic_execute", "dynamic_graph_execute_mode", True),
    ("variable_format_optimize", "b", None, "variable_format_optimize", False),
    ("device_type", "s", "default_device_type", "device_type", True),
    ("job", "s", "localhost", "job", True),
    ("task_index", "i", 0, "task_index", True),
]

# class -> name -> (legal values, (illegal value, exception) pairs, what else the constructor is given)
_DUMPS = {"enable_dump": True, "dump_path": "{directory}"}
_DEBUGS = {"enable_dump_debug": True, "dump_path": "{directory}"}
_PROFILES = {"enable_profiling": True}
_SHAPES = {"input_shape": "a:-1", "dynamic_dims": "1;2", "dynamic_node_type": 1, "compile_hybrid_mode": 0}
HELPER_VALUES = {
    "ProfilingConfig": {
        "enable_profiling": ([True, False, 1], [*NOT_BOOLEAN, (None, TypeError)], {}),
        "profiling_options": (
            [None, "", "{}", '{"output": "/tmp", "task_trace": "on"}', b"{}"],
            [("{output:./}", ValueError), ("[]", ValueError), ('{"a": 1', ValueError), *NOT_TEXT],
            _PROFILES,
        ),
    },
    "DumpConfig": {
        "enable_dump": ([True, False], [*NOT_BOOLEAN, (None, TypeError)], {"dump_path": "{directory}"}),
        "enable_dump_debug": (
            [True, False],
            [*NOT_BOOLEAN, (None, TypeError)],
            {"dump_path": "{directory}"},
        ),
        "dump_path": (
            ["{directory}"],
            [(None, ValueError), *NOT_TEXT],
            {"enable_dump": True},
        ),
        "dump_step": (
            [None, "0", "5|10", "0|5|10-20", "|".join(["1"] * 100)],
            [
                ("|".join(["1"] * 101), ValueError),
                ("a", ValueError),
                ("5-5", ValueError),
                ("5-", ValueError),
                ("1||2", ValueError),
                *NOT_TEXT,
            ],
            _DUMPS,
        ),
        "dump_mode": (["input", "output", "all", None], [("both", ValueError), *NOT_TEXT], _DUMPS),
        "dump_debug_mode": (
            ["aicore_overflow", "atomic_overflow", "all", None],
            [("some", ValueError), *NOT_TEXT],
            _DEBUGS,
        ),
        "dump_data": (["tensor", "stats", None], [("csv", ValueError), *NOT_TEXT], {}),
        "dump_layer": ([None, "conv1 conv2"], NOT_TEXT, {}),
    },
    "MemoryConfig": {
        "atomic_clean_policy": ([0, 1, 5], [*NOT_INTEGER, (None, TypeError)], {}),
        "static_memory_policy": ([0, 1, 2, 3, 4, None], NOT_INTEGER, {}),
        "memory_optimization_policy": ([None, "any"], NOT_TEXT, {}),
        "variable_use_1g_huge_page": (
            [0, 1, 2, None],
            [(3, ValueError), (-1, ValueError), *NOT_INTEGER],
            {},
        ),
    },
    "DynamicInputConfig": {
        "input_shape": (
            ["a:-1", "a:-1;b:3,4", "s:0;x:-1", None],
            [("a", ValueError), ("a:x", ValueError), (":1", ValueError), *NOT_TEXT],
            _SHAPES,
        ),
        "dynamic_dims": (
            ["1;2", "1;2;4;8", None],
            [("1", ValueError), ("1;x", ValueError), ("1,2;3", ValueError), ("-1;2", ValueError), *NOT_TEXT],
            _SHAPES,
        ),
        "dynamic_node_type": ([0, 1, None], [(2, ValueError), (-1, ValueError), *NOT_INTEGER], _SHAPES),
        "compile_hybrid_mode": ([0, 1, None], [(2, ValueError), (-1, ValueError), *NOT_INTEGER], _SHAPES),
    },
    "GraphMemoryOptimizeConfig": {
        "recompute": ([None, "auto", "manual"], [("on", ValueError), (1, ValueError)], {}),
        "graph_slice": ([None, "auto", "manual"], [("on", ValueError), (1, ValueError)], {}),
    },
    "ExperimentalConfig": {
        "logical_device_cluster_deploy_mode": (["LB", "SINGLE", None], NOT_TEXT, {}),
        "logical_device_id": ([None, "[0:0]"], NOT_TEXT, {}),
        "model_deploy_mode": ([None, "any"], NOT_TEXT, {}),
        "model_deploy_devicelist": ([None, "any"], NOT_TEXT, {}),
        "graph_memory_optimize_config": ([None], [({}, ValueError), ("auto", ValueError)], {}),
        "enable_graph_parallel": ([None, True, False], NOT_BOOLEAN, {}),
        "graph_parallel_option_path": ([None, "any"], NOT_TEXT, {}),
        "graph_compiler_cache_dir": (
            [None, "{directory}"],
            [("/no/such/directory", ValueError), *NOT_TEXT],
            {},
        ),
        "resource_config_path": ([None, "any"], NOT_TEXT, {}),
        "accelerate_train_mode": (
            [
                None,
                "",
                "fast|step",
                "fast1|step|0.2",
                "fast1|loss",
                "fast|loss|1.01",
                "fast|loss|1.5",
            ],
            [
                ("fast", ValueError),
                ("fast|step|0.9|x", ValueError),
                ("FAST|step", ValueError),
                ("fast|steps", ValueError),
                ("fast|step|0.19999999", ValueError),
                ("fast|step|0.90000001", ValueError),
                ("fast|loss|1.0", ValueError),
                ("fast|loss|1.51", ValueError),
                ("fast|step|abc", ValueError),
                ("fast|step| 0.5", ValueError),
                ("fast|step|nan", ValueError),
                *NOT_TEXT,
            ],
            {},
        ),
    },
}

# Session key -> (legal values, illegal values, each a ValueError). Other keys take anything.
SESSION_VALUES = {
    "graph_run_mode": ([0, 1], [2, -1]),
    "session_device_id": ([0, 5], [-1]),
    "iterations_per_loop": ([1, 10], [0, -1]),
    "precision_mode": (["must_keep_origin_dtype", "allow_mix_precision"], ["", "mixed_float16"]),
    "precision_mode_v2": (["origin", "fp16", "mixed_float16"], ["cube_hif8", "mixed_hif8", "x"]),
    "op_select_implmode": (["high_precision"], ["x"]),
    "dump_data": (["tensor", "stats"], ["x"]),
    "dump_step": (["0|5-10"], ["x", "9-1"]),
    "dump_mode": (["input", "all"], ["x"]),
    "dump_debug_mode": (["aicore_overflow", "all"], ["x"]),
    "buffer_optimize": (["l2_optimize", "off_optimize"], ["x"]),
    "variable_placement": (["Device", "Host"], ["x"]),
    "graph_max_parallel_model_num": ([1, 2], [0]),
    "variable_use_1g_huge_page": ([0, 1, 2], [3]),
    "enable_exception_dump": ([0, 1, 2], [3]),
    "export_compile_stat": ([0, 1, 2], [3]),
    "aoe_mode": (["1", "2", "4"], ["3"]),
    "local_rank_id": ([0, 7], [8]),
    "local_device_list": (["0,1"], ["a"]),
    "jit_compile": (["true", "false", "auto"], ["True"]),
    "shape_generalization_mode": (["STRICT", "FULL", "ADAPTIVE"], ["strict"]),
    "graph_slice": (["auto", "manual"], ["x"]),
    "experimental_accelerate_train_mode": (["fast|step", "fast1|loss|1.2"], ["fast"]),
    "insert_op_file": ([], ["x"]),
    "task_index": ([0, 3], [-1]),
    "compress_weight_conf": (["weights.cfg"], []),
    "input_fusion_size": ([0, 5, -1, 2**40], []),
    "oo_constant_folding": ([True, False], []),
    "use_off_line": ([True, False], []),
    "job": (["worker", "ps"], []),
    "graph_exec_timeout": ([1, -1], []),
}
