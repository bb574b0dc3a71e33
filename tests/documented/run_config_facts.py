"""The documented facts about NPURunConfig, as plain data.

Written from the documentation, not from the option table, so that the two can be compared.
"""

# name, default, attribute that holds it (None: kept by tf.estimator.RunConfig); in positional order.
RUN_CONFIG_PARAMETERS = [
    ("iterations_per_loop", 1, "iterations_per_loop"),
    ("profiling_config", None, "_profiling_config"),
    ("model_dir", None, None),
    ("tf_random_seed", None, None),
    ("save_summary_steps", 0, None),
    ("save_checkpoints_steps", None, None),
    ("save_checkpoints_secs", None, None),
    ("session_config", None, None),
    ("keep_checkpoint_max", 5, None),
    ("keep_checkpoint_every_n_hours", 10000, None),
    ("log_step_count_steps", 100, None),
    ("distribute", None, None),
    ("enable_data_pre_proc", True, "enable_data_pre_proc"),
    ("precision_mode", None, "_precision_mode"),
    ("enable_reduce_precision", False, "_enable_reduce_precision"),
    ("variable_format_optimize", None, "variable_format_optimize"),
    ("mix_compile_mode", False, "mix_compile_mode"),
    ("hcom_parallel", True, "_hcom_parallel"),
    ("graph_memory_max_size", None, "_graph_memory_max_size"),
    ("variable_memory_max_size", None, "_variable_memory_max_size"),
    ("dump_config", None, "_dump_config"),
    ("stream_max_parallel_num", None, "_stream_max_parallel_num"),
    ("is_tailing_optimization", False, "is_tailing_optimization"),
    ("horovod_mode", False, "horovod_mode"),
    ("graph_run_mode", 1, "graph_run_mode"),
    ("op_debug_level", None, "op_debug_level"),
    ("enable_scope_fusion_passes", None, "enable_scope_fusion_passes"),
    ("enable_exception_dump", 2, "enable_exception_dump"),
    ("op_select_implmode", None, "_op_select_implmode"),
    ("optypelist_for_implmode", None, "_optypelist_for_implmode"),
    ("dynamic_input_config", None, "_dynamic_input_config"),
    ("aoe_mode", None, "_aoe_mode"),
    ("work_path", None, "_work_path"),
    ("buffer_optimize", "l2_optimize", "_buffer_optimize"),
    ("enable_small_channel", 0, "_enable_small_channel"),
    ("fusion_switch_file", None, "_fusion_switch_file"),
    ("enable_compress_weight", False, "_enable_compress_weight"),
    ("compress_weight_conf", None, "_compress_weight_conf"),
    ("op_compiler_cache_mode", None, "_op_compiler_cache_mode"),
    ("op_compiler_cache_dir", None, "_op_compiler_cache_dir"),
    ("debug_dir", None, "_debug_dir"),
    ("hcom_multi_mode", False, "_hcom_multi_mode"),
    ("dynamic_input", None, "_dynamic_input"),
    ("dynamic_graph_execute_mode", "dynamic_execute", "_dynamic_graph_execute_mode"),
    ("dynamic_inputs_shape_range", None, "_dynamic_inputs_shape_range"),
    ("train_distribute", None, None),
    ("eval_distribute", None, None),
    ("local_rank_id", None, "_local_rank_id"),
    ("local_device_list", None, "_local_device_list"),
    ("session_device_id", None, "_session_device_id"),
    ("distribute_config", None, "_distribute_config"),
    ("modify_mixlist", None, "_modify_mixlist"),
    ("op_precision_mode", None, "_op_precision_mode"),
    ("device_type", "default_device_type", "_device_type"),
    ("soc_config", None, "_soc_config"),
    ("hccl_timeout", None, "_hccl_timeout"),
    ("op_wait_timeout", None, "_op_wait_timeout"),
    ("op_execute_timeout", None, "_op_execute_timeout"),
    ("HCCL_algorithm", None, "_HCCL_algorithm"),
    ("customize_dtypes", None, "_customize_dtypes"),
    ("op_debug_config", None, "_op_debug_config"),
    ("memory_config", None, "_memory_config"),
    ("experimental_config", None, "_experimental_config"),
    ("topo_sorting_mode", None, "topo_sorting_mode"),
    ("aoe_config_file", None, "aoe_config_file"),
    ("insert_op_file", None, "insert_op_file"),
    ("stream_sync_timeout", -1, "stream_sync_timeout"),
    ("event_sync_timeout", -1, "event_sync_timeout"),
    ("external_weight", False, "_external_weight"),
    ("deterministic", 0, "_deterministic"),
    ("frozen_variable", False, "_frozen_variable"),
    ("variable_placement", "Device", "_variable_placement"),
    ("jit_compile", "auto", "_jit_compile"),
    ("precision_mode_v2", None, "_precision_mode_v2"),
    ("ac_parallel_enable", None, "_ac_parallel_enable"),
    ("quant_dumpable", None, "_quant_dumpable"),
    ("input_fusion_size", 131072, "_input_fusion_size"),
    ("compile_dynamic_mode", None, "_compile_dynamic_mode"),
    ("graph_max_parallel_model_num", 1, "_graph_max_parallel_model_num"),
    ("export_compile_stat", 1, "_export_compile_stat"),
    ("aicore_num", None, "_aicore_num"),
    ("oo_constant_folding", True, "_oo_constant_folding"),
    ("input_batch_cpy", False, "_input_batch_cpy"),
    ("shape_generalization_mode", "STRICT", "_shape_generalization_mode"),
    ("all_tensor_not_empty", False, "_all_tensor_not_empty"),
    ("auto_multistream_parallel_mode", None, "_auto_multistream_parallel_mode"),
    ("oo_level", "O3", "_oo_level"),
    ("optimization_switch", None, "_optimization_switch"),
]

PRECISION_MODES = [
    "must_keep_origin_dtype",
    "allow_fp32_to_fp16",
    "allow_fp32_to_bf16",
    "force_fp16",
    "force_fp32",
    "cube_fp16in_fp32out",
    "allow_mix_precision_fp16",
    "allow_mix_precision",
    "allow_mix_precision_bf16",
]
NOT_TEXT = [(1, TypeError), (1.5, TypeError), (True, TypeError), (["a"], TypeError), ("a\0b", ValueError)]
NOT_INTEGER = [
    ("1", TypeError),
    (True, TypeError),
    (1.5, TypeError),
    ([1], TypeError),
    (2**63, ValueError),
    (-(2**63) - 1, ValueError),
]
NOT_BOOLEAN = [("True", TypeError), (1.5, TypeError), ([True], TypeError), (2, ValueError), (-1, ValueError)]
NOT_WHOLE = [(1.5, ValueError), (float("inf"), ValueError), (2**63, ValueError), (True, TypeError)]
_MIXED = {"precision_mode_v2": "mixed_float16"}


def _each(names, row):
    return dict.fromkeys(names.split(), row)


# name -> (legal values, (illegal value, exception) pairs). "{directory}" stands for an existing directory.
RUN_CONFIG_VALUES = {
    **_each(
        "stream_sync_timeout event_sync_timeout",
        ([-1, 0, 60000], [*NOT_INTEGER, (None, TypeError)]),
    ),
    **_each(
        "hccl_timeout op_wait_timeout op_execute_timeout",
        ([None, 0, 1836, 2147483647], NOT_INTEGER),
    ),
    **_each(
        "distribute train_distribute eval_distribute",
        ([None], [(1, ValueError), ("mirrored", ValueError)]),
    ),
    **_each(
        "profiling_config dump_config dynamic_input_config memory_config experimental_config session_config",
        ([None], [({}, ValueError), ("on", ValueError), (1, ValueError)]),
    ),
    **_each(
        "fusion_switch_file op_compiler_cache_dir debug_dir dynamic_inputs_shape_range distribute_config "
        "op_precision_mode op_debug_config aoe_config_file soc_config HCCL_algorithm",
        ([None, "", "text", b"text"], NOT_TEXT),
    ),
    **_each(
        "variable_format_optimize dynamic_input compile_dynamic_mode oo_constant_folding input_batch_cpy "
        "all_tensor_not_empty",
        ([None, True, False], NOT_BOOLEAN),
    ),
    **_each(
        "enable_reduce_precision is_tailing_optimization enable_compress_weight hcom_multi_mode "
        "external_weight frozen_variable",
        ([True, False], [*NOT_BOOLEAN, (None, TypeError)]),
    ),
    "iterations_per_loop": (
        [1, 2, 100],
        [(True, TypeError), (0, ValueError), (-1, ValueError), (1.0, TypeError), ("1", TypeError), (None, TypeError)],
    ),
    "model_dir": ([None, "out", "{directory}"], [("", ValueError), (5, TypeError), ("a\0b", ValueError)]),
    "tf_random_seed": ([None, 0, 1, -1, 2**40], [("1", ValueError), (1.5, ValueError), (True, ValueError)]),
    "save_summary_steps": ([0, 1, 100, None], [(-1, ValueError), ("1", TypeError), *NOT_WHOLE]),
    "save_checkpoints_steps": ([None, 0, 1, 1000, 1e6], [(-1, ValueError), ("1", TypeError), *NOT_WHOLE]),
    "save_checkpoints_secs": ([None, 0, 1, 600, 0.5], [(-1, ValueError), ("1", TypeError), (True, TypeError)]),
    "keep_checkpoint_max": ([None, 0, 1, 5], [(-1, ValueError), ("1", TypeError), *NOT_WHOLE]),
    "keep_checkpoint_every_n_hours": ([1, 0.5, 10000], [(0, ValueError), (-1, ValueError), ("1", TypeError)]),
    "log_step_count_steps": ([None, 1, 100], [(0, ValueError), (-1, ValueError), ("1", TypeError), *NOT_WHOLE]),
    "enable_data_pre_proc": ([True, False, 1, 0], [*NOT_BOOLEAN, (None, TypeError)]),
    "precision_mode": (
        [None, *PRECISION_MODES],
        [("mixed_float16", ValueError), ("ALLOW_MIX_PRECISION", ValueError), ("", ValueError), *NOT_TEXT],
    ),
    "mix_compile_mode": ([True, False], [("True", TypeError), (1, TypeError), (2, TypeError), (None, TypeError)]),
    "hcom_parallel": ([True, False, 1], [*NOT_BOOLEAN, (None, TypeError)]),
    "graph_memory_max_size": ([None, "26*1024", 5, 1.5], []),
    "variable_memory_max_size": ([None, "5*1024", 5, 1.5], []),
    "stream_max_parallel_num": ([None, "DNN_VM_AICPU:10,AIcoreEngine:1", "AIcoreEngine"], NOT_TEXT),
    "horovod_mode": ([True, False], [(1, ValueError), ("True", ValueError), (None, ValueError)]),
    "graph_run_mode": ([0, 1], [(2, ValueError), (-1, ValueError), ("1", TypeError), (None, TypeError)]),
    "op_debug_level": ([None, 0, 1, 2, 3, 4, 9], NOT_INTEGER),
    "enable_scope_fusion_passes": ([None, "A,B"], NOT_TEXT),
    "enable_exception_dump": (
        [0, 1, 2],
        [(3, ValueError), (-1, ValueError), ("1", TypeError), (None, TypeError)],
    ),
    "op_select_implmode": (
        [None, "high_precision", "high_performance", "high_precision_for_all", "high_performance_for_all"],
        [("fast", ValueError), ("High_precision", ValueError), *NOT_TEXT],
    ),
    "optypelist_for_implmode": ([None, "Pooling,SoftmaxV2"], NOT_TEXT),
    "aoe_mode": ([None, "1", "2", "4"], [("3", ValueError), ("", ValueError), *NOT_TEXT]),
    "work_path": ([None, "{directory}"], NOT_TEXT),
    "buffer_optimize": ([None, "l2_optimize", "off_optimize"], [("l1_optimize", ValueError), *NOT_TEXT]),
    "enable_small_channel": ([0, 1], [*NOT_INTEGER, (None, TypeError)]),
    "compress_weight_conf": ([None], [("weights.cfg", ValueError), (1, TypeError)]),
    "op_compiler_cache_mode": ([None, "enable", "force", "disable"], NOT_TEXT),
    "dynamic_graph_execute_mode": ([None, "dynamic_execute", "lazy_recompile"], NOT_TEXT),
    "local_rank_id": ([None, 0, 7], [(-1, ValueError), (8, ValueError), *NOT_INTEGER]),
    "local_device_list": (
        [None, "0", "0,1"],
        [("0;1", ValueError), ("a", ValueError), *NOT_TEXT],
    ),
    "session_device_id": ([None, 0, 3], [(-1, ValueError), *NOT_INTEGER]),
    "modify_mixlist": ([None, "mixlist.json"], [("no-such.json", ValueError), *NOT_TEXT]),
    "device_type": (["default_device_type", "other"], [*NOT_TEXT, (None, TypeError)]),
    "customize_dtypes": ([None, "dtypes.cfg"], [("no-such.cfg", ValueError), *NOT_TEXT]),
    "topo_sorting_mode": ([None, 0, 1], NOT_INTEGER),
    "insert_op_file": ([None], [("ops.cfg", TypeError), (b"ops.cfg", ValueError), (1, TypeError)]),
    "deterministic": ([0, 1, 2], [*NOT_INTEGER, (None, TypeError)]),
    "variable_placement": (["Device", "Host"], [("device", ValueError), (None, TypeError), *NOT_TEXT]),
    "jit_compile": (
        ["auto", "true", "false"],
        [("True", ValueError), ("", ValueError), (True, TypeError), (b"auto", TypeError), (None, TypeError)],
    ),
    "precision_mode_v2": (
        [None, "origin", "fp16", "cube_fp16in_fp32out", "mixed_float16", "mixed_bfloat16"],
        [
            ("mixed_hif8", ValueError),
            ("cube_hif8", ValueError),
            ("allow_mix_precision", ValueError),
            ("FP16", ValueError),
            ("", ValueError),
            *NOT_TEXT,
        ],
    ),
    "ac_parallel_enable": ([None, "0", "1"], NOT_TEXT),
    "quant_dumpable": ([None, "0", "1"], NOT_TEXT),
    "input_fusion_size": ([0, 131072, 33554432, -5, 2**40], [*NOT_INTEGER, (None, TypeError)]),
    "graph_max_parallel_model_num": (
        [1, 2147483647, None],
        [(0, ValueError), (-1, ValueError), *NOT_INTEGER],
    ),
    "export_compile_stat": ([0, 1, 2, None], [(3, ValueError), (-1, ValueError), *NOT_INTEGER]),
    "aicore_num": ([None, "24|48"], NOT_TEXT),
    "shape_generalization_mode": (
        ["STRICT", "FULL", "ADAPTIVE", None],
        [("strict", ValueError), ("", ValueError), *NOT_TEXT],
    ),
    "auto_multistream_parallel_mode": (
        [None, "cv", "LoadBalance", "LoadBalance:4", "MainStream:64"],
        NOT_TEXT,
    ),
    "oo_level": (["O3", "O1", None], NOT_TEXT),
    "optimization_switch": ([None, "pass_a:on;pass_b:off"], NOT_TEXT),
}
# Other options that some options need to be legal.
NEEDS = {
    "optypelist_for_implmode": {"op_select_implmode": "high_precision"},
    "modify_mixlist": _MIXED,
    "work_path": {"aoe_mode": "2"},
    "distribute_config": {"aoe_mode": "2"},
    "dynamic_graph_execute_mode": {"dynamic_input": True},
    "shape_generalization_mode": {"jit_compile": "true"},
}

# Combinations the documentation forbids, each a ValueError naming the option given first.
FORBIDDEN = [
    ("precision_mode_v2", {"precision_mode": "force_fp16", "precision_mode_v2": "fp16"}),
    ("modify_mixlist", {"modify_mixlist": "m.json"}),
    ("modify_mixlist", {"modify_mixlist": "m.json", "precision_mode": "force_fp16"}),
    ("modify_mixlist", {"modify_mixlist": "m.json", "precision_mode_v2": "origin"}),
    ("optypelist_for_implmode", {"optypelist_for_implmode": "Pooling"}),
    ("iterations_per_loop", {"mix_compile_mode": True, "iterations_per_loop": 2}),
    (
        "iterations_per_loop",
        {"dynamic_input": True, "dynamic_graph_execute_mode": "lazy_recompile", "iterations_per_loop": 2},
    ),
    ("dynamic_graph_execute_mode", {"dynamic_input": True, "dynamic_graph_execute_mode": "x"}),
    ("save_checkpoints_secs", {"save_checkpoints_steps": 5, "save_checkpoints_secs": 5}),
    ("save_checkpoints_secs", {"save_checkpoints_steps": 0, "save_checkpoints_secs": 0}),
    ("work_path", {"aoe_mode": "1", "work_path": "/no/such/directory"}),
    ("compress_weight_conf", {"compress_weight_conf": "w.cfg"}),
]
# precision of the run -> whether accelerate_train_mode may start from it
ACCELERATED_FROM = {
    ("precision_mode", mode): mode in ("must_keep_origin_dtype", "allow_fp32_to_fp16") for mode in PRECISION_MODES
}
ACCELERATED_FROM.update(
    {
        ("precision_mode_v2", "origin"): True,
        ("precision_mode_v2", "fp16"): False,
        ("precision_mode_v2", "mixed_float16"): False,
        ("precision_mode_v2", "mixed_bfloat16"): False,
        ("precision_mode_v2", "cube_fp16in_fp32out"): False,
    }
)
# save_checkpoints_steps, save_checkpoints_secs -> what the object then holds
CHECKPOINT_TRIGGERS = [
    ((None, None), (100, None)),
    ((7, None), (7, None)),
    ((0, None), (0, None)),
    ((None, 60), (None, 60)),
    ((None, 0), (None, 0)),
]
# Two mistakes at once -> the one reported first.
CHECK_ORDER = [
    ({"iterations_per_loop": "x", "mix_compile_mode": 1}, "iterations_per_loop", TypeError),
    ({"iterations_per_loop": 0, "mix_compile_mode": 1}, "iterations_per_loop", ValueError),
    ({"mix_compile_mode": 1, "jit_compile": 1}, "mix_compile_mode", TypeError),
    (
        {"mix_compile_mode": True, "iterations_per_loop": 2, "jit_compile": 1},
        "iterations_per_loop",
        ValueError,
    ),
    ({"jit_compile": 1, "dump_config": 1}, "jit_compile", TypeError),
    ({"jit_compile": "x", "graph_run_mode": "x"}, "graph_run_mode", TypeError),
    ({"dump_config": 1, "horovod_mode": 1}, "dump_config", ValueError),
    ({"horovod_mode": 1, "graph_run_mode": "x"}, "horovod_mode", ValueError),
    ({"graph_run_mode": "x", "enable_exception_dump": "x"}, "graph_run_mode", TypeError),
    ({"enable_exception_dump": "x", "dynamic_input_config": 1}, "enable_exception_dump", TypeError),
    ({"dynamic_input_config": 1, "experimental_config": 1}, "dynamic_input_config", ValueError),
    ({"experimental_config": 1, "save_summary_steps": -1}, "experimental_config", ValueError),
    ({"save_summary_steps": -1, "precision_mode": 1}, "save_summary_steps", ValueError),
]
