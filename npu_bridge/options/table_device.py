"""Options of devices, memory and streams, and the options only a session's parameter_map has."""

from __future__ import annotations

import functools

from npu_bridge.options.grammar import (
    parse_core_numbers,
    parse_device_list,
    parse_multistream_mode,
    parse_stream_limits,
)
from npu_bridge.options.kinds import Boolean, Integer, OneOf, StringifiedValue, Text
from npu_bridge.options.table import MEMORY, RUN_CONFIG, SESSION, Option, recorded, works

_OWN_MEMORY = recorded("TensorFlow manages memory.")
_OWN_STREAMS = recorded("TensorFlow schedules operators.")
_NO_DEVICE = recorded("No NPU is driven.")
_NOTHING_READS_IT = "Nothing documented reads it."
_memory = functools.partial(Option, owner=MEMORY)
_session = functools.partial(Option, owner=SESSION)

OPTIONS = (
    *(
        Option(position, name, StringifiedValue(), doc, _OWN_MEMORY, status="deprecated")
        for position, name, doc in (
            (19, "graph_memory_max_size", "Memory limit of a graph. The NPU stack ignores it, too."),
            (20, "variable_memory_max_size", "Memory limit of variables. The NPU stack ignores it, too."),
        )
    ),
    Option(
        22,
        "stream_max_parallel_num",
        Text(parse=parse_stream_limits, says="DNN_VM_AICPU:n,AIcoreEngine:n", enforced=False),
        "Number of parallel streams of each engine.",
        _OWN_STREAMS,
    ),
    Option(
        35,
        "enable_small_channel",
        Integer(0, 1, enforced=False),
        "1: optimise convolutions with at most 4 channels. graph_run_mode=0 sets it to 1.",
        default=0,
    ),
    Option(
        48,
        "local_rank_id",
        Integer(0, 7),
        "Rank of the process that prepares the data for its host.",
        _NO_DEVICE,
        absent=-1,
    ),
    Option(
        49,
        "local_device_list",
        Text(parse=parse_device_list, says="device numbers separated by commas"),
        "Devices that get their data from this process.",
        works("The GPUs that a session uses if session_device_id is not set."),
    ),
    Option(
        50,
        "session_device_id",
        Integer(0),
        "Device that this session uses.",
        works(
            "The GPU that a session uses, modulo the number of GPUs. gpu_options.visible_device_list of session_config "
            "overrides it."
        ),
        absent=-1,
    ),
    Option(
        54,
        "device_type",
        Text(),
        "Device type of the engine.",
        _NO_DEVICE,
        default="default_device_type",
        status="undocumented",
    ),
    Option(55, "soc_config", Text(), "Version of the chip.", _NO_DEVICE, status="undocumented"),
    Option(57, "op_wait_timeout", Integer(), "Wait timeout of an operator in seconds.", _NO_DEVICE),
    Option(58, "op_execute_timeout", Integer(), "Execution timeout of an operator in seconds.", _NO_DEVICE),
    Option(
        67,
        "stream_sync_timeout",
        Integer(),
        "Timeout of stream synchronisation in milliseconds. -1: no timeout.",
        _OWN_STREAMS,
        default=-1,
        attribute="stream_sync_timeout",
    ),
    Option(
        68,
        "event_sync_timeout",
        Integer(),
        "Timeout of event synchronisation in milliseconds. -1: no timeout.",
        _OWN_STREAMS,
        default=-1,
        attribute="event_sync_timeout",
    ),
    Option(69, "external_weight", Boolean(), "Store constant weights in separate files.", default=False),
    Option(
        72,
        "variable_placement",
        Text(("Device", "Host")),
        "Where to place variables. Use Host only with mix_compile_mode=True.",
        works("Host in NPURunConfig places variables on the CPU. A session comes too late: its graph is built."),
        default="Device",
    ),
    Option(
        75,
        "ac_parallel_enable",
        Text(("0", "1"), enforced=False),
        "1: use the two kinds of cores in parallel.",
        _OWN_STREAMS,
    ),
    Option(
        77,
        "input_fusion_size",
        Integer(0, 33554432, clamps=True),
        "Fuse copies to the device that are smaller than so many bytes. 0: never. A value out of range is clamped.",
        _OWN_MEMORY,
        default=131072,
    ),
    Option(
        79,
        "graph_max_parallel_model_num",
        Integer(1, 2147483647),
        "Number of inference threads for a graph.",
        _OWN_STREAMS,
        default=1,
        accepts_none=True,
    ),
    Option(
        81,
        "aicore_num",
        Text(parse=parse_core_numbers, says="cube|vector, two positive numbers", enforced=False),
        "Number of cores that kernels use.",
        _NO_DEVICE,
    ),
    Option(
        83,
        "input_batch_cpy",
        Boolean(),
        "Copy several inputs to the device at once.",
        _OWN_MEMORY,
        default=False,
        accepts_none=True,
    ),
    Option(
        86,
        "auto_multistream_parallel_mode",
        Text(parse=parse_multistream_mode, says="cv or LoadBalance:n or MainStream:n with n in 1..64", enforced=False),
        "Use of parallel streams for the two kinds of cores.",
        _OWN_STREAMS,
    ),
    _memory(
        1,
        "atomic_clean_policy",
        OneOf((0, 1), enforced=False),
        "How workspaces are cleared. 0: all at once. 1: for each operator.",
        _OWN_MEMORY,
        default=0,
    ),
    _memory(
        2,
        "static_memory_policy",
        OneOf((0, 1, 2, 3, 4), enforced=False),
        "Memory allocation. 0: dynamic. 1 or 2: growing, for static shapes. 3: growing, for dynamic shapes. 4: both.",
        _OWN_MEMORY,
        default=0,
        accepts_none=True,
    ),
    _memory(3, "memory_optimization_policy", Text(), "Memory optimisation policy.", _OWN_MEMORY),
    _memory(
        4,
        "variable_use_1g_huge_page",
        OneOf((0, 1, 2)),
        "Page size for variables. 0: default. 1: 1 GiB only. 2: 1 GiB, otherwise 2 MiB.",
        _OWN_MEMORY,
        default=0,
        accepts_none=True,
    ),
    _session(
        1,
        "use_off_line",
        Boolean(),
        "False: run the session as if this package were not installed.",
        works("False: no other option has an effect on this session."),
        default=True,
    ),
    _session(
        2,
        "in_out_pair_flag",
        Boolean(),
        "Whether the nodes of in_out_pair run on the device.",
        _NO_DEVICE,
        default=True,
    ),
    _session(
        3,
        "in_out_pair",
        Text(says="the text of a list [[in_nodes, out_nodes]]"),
        "First and last nodes of the part that runs on the device. Needs mix_compile_mode.",
        _NO_DEVICE,
    ),
    _session(
        4,
        "auto_tune_mode",
        Text(),
        "Former tuning option.",
        recorded("There is no tuning. NPURunConfig accepts the keyword, too, with a warning."),
        former_owner=RUN_CONFIG,
        status="undocumented",
    ),
    _session(
        5,
        "graph_exec_timeout",
        Integer(),
        "Execution timeout of a graph in milliseconds.",
        _NO_DEVICE,
        default=600000,
        status="undocumented",
    ),
    _session(6, "const_input", Text(), _NOTHING_READS_IT, status="undocumented"),
    _session(7, "lower_functional_ops", Boolean(), _NOTHING_READS_IT, default=False, status="undocumented"),
    _session(
        8,
        "job",
        Text(),
        "Task type of this process, from TF_CONFIG.",
        recorded("TensorFlow reads TF_CONFIG itself."),
        default="localhost",
    ),
    _session(
        9,
        "task_index",
        Integer(0),
        "Task index of this process, from TF_CONFIG.",
        recorded("TensorFlow reads TF_CONFIG itself."),
        default=0,
    ),
    _session(
        10,
        "min_group_size",
        Boolean(),
        "Nothing reads it, on the NPU stack either.",
        default=True,
        status="undocumented",
    ),
)
