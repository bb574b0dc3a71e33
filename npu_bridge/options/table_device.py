"""Options of devices, memory and streams, and the options only a session's parameter_map has."""

from __future__ import annotations

import functools

from npu_bridge.options.grammar import (
    parse_core_numbers,
    parse_device_list,
    parse_multistream_mode,
    parse_stream_limits,
)
from npu_bridge.options.kinds import Boolean, Integer, OneOf, Stringified, Text
from npu_bridge.options.table import MEMORY, RUN_CONFIG, SESSION, Option, recorded, works

_OWN_MEMORY = recorded("TensorFlow manages memory.")
_OWN_STREAMS = recorded("TensorFlow schedules operators.")
_NO_DEVICE = recorded("No NPU is driven.")
_NOTHING_READS_IT = "Nothing documented reads it."
_memory = functools.partial(Option, owner=MEMORY)
_session = functools.partial(Option, owner=SESSION)

OPTIONS = (
    *(
        Option(position, name, Stringified(), doc, _OWN_MEMORY, status="deprecated")
        for position, name, doc in (
            (19, "graph_memory_max_size", "Memory limit of a graph; ignored on the NPU stack too."),
            (20, "variable_memory_max_size", "Memory limit of variables; ignored on the NPU stack too."),
        )
    ),
    Option(
        22,
        "stream_max_parallel_num",
        Text(parse=parse_stream_limits, says="DNN_VM_AICPU:n,AIcoreEngine:n", enforced=False),
        "Concurrency of the engines.",
        _OWN_STREAMS,
    ),
    Option(
        35,
        "enable_small_channel",
        Integer(0, 1, enforced=False),
        "1 for convolutions with at most 4 channels; graph_run_mode=0 makes it 1.",
        default=0,
    ),
    Option(
        48, "local_rank_id", Integer(0, 7), "Rank whose process prepares the data of its host.", _NO_DEVICE, absent=-1
    ),
    Option(
        49,
        "local_device_list",
        Text(parse=parse_device_list, says="device numbers separated by commas"),
        "Devices fed by that process.",
        works("The GPUs a session sees when session_device_id does not say."),
    ),
    Option(
        50,
        "session_device_id",
        Integer(0),
        "Device of this session.",
        works(
            "The GPU a session sees, modulo the GPUs there are; gpu_options.visible_device_list in session_config wins."
        ),
        absent=-1,
    ),
    Option(
        54,
        "device_type",
        Text(),
        "Type of the engine's device.",
        _NO_DEVICE,
        default="default_device_type",
        status="undocumented",
    ),
    Option(55, "soc_config", Text(), "Version of the chip.", _NO_DEVICE, status="undocumented"),
    Option(57, "op_wait_timeout", Integer(), "Seconds an operator may wait.", _NO_DEVICE),
    Option(58, "op_execute_timeout", Integer(), "Seconds an operator may run.", _NO_DEVICE),
    Option(
        67,
        "stream_sync_timeout",
        Integer(),
        "Milliseconds a stream may take to finish; -1 for no limit.",
        _OWN_STREAMS,
        default=-1,
        attribute="stream_sync_timeout",
    ),
    Option(
        68,
        "event_sync_timeout",
        Integer(),
        "Milliseconds an event may take; -1 for no limit.",
        _OWN_STREAMS,
        default=-1,
        attribute="event_sync_timeout",
    ),
    Option(69, "external_weight", Boolean(), "Store constant weights in files of their own.", default=False),
    Option(
        72,
        "variable_placement",
        Text(("Device", "Host")),
        "Where variables live; Host is meant for mix_compile_mode=True.",
        works("Through NPURunConfig, Host pins variables to the CPU; a session finds its graph built already."),
        default="Device",
    ),
    Option(
        75,
        "ac_parallel_enable",
        Text(("0", "1"), enforced=False),
        "1 lets the two kinds of cores work in parallel.",
        _OWN_STREAMS,
    ),
    Option(
        77,
        "input_fusion_size",
        Integer(0, 33554432, clamps=True),
        "Bytes below which copies to the device are fused; 0 never; clamped to its range.",
        _OWN_MEMORY,
        default=131072,
    ),
    Option(
        79,
        "graph_max_parallel_model_num",
        Integer(1, 2147483647),
        "Inference threads of a graph.",
        _OWN_STREAMS,
        default=1,
        accepts_none=True,
    ),
    Option(
        81,
        "aicore_num",
        Text(parse=parse_core_numbers, says="cube|vector, two positive numbers", enforced=False),
        "Cores used by kernels.",
        _NO_DEVICE,
    ),
    Option(
        83,
        "input_batch_cpy",
        Boolean(),
        "Copy several inputs in one batch.",
        _OWN_MEMORY,
        default=False,
        accepts_none=True,
    ),
    Option(
        86,
        "auto_multistream_parallel_mode",
        Text(parse=parse_multistream_mode, says="cv or LoadBalance:n or MainStream:n with n in 1..64", enforced=False),
        "Parallel streams of the two kinds of cores.",
        _OWN_STREAMS,
    ),
    _memory(
        1,
        "atomic_clean_policy",
        OneOf((0, 1), enforced=False),
        "Clean workspaces in one sweep (0) or for each operator (1).",
        _OWN_MEMORY,
        default=0,
    ),
    _memory(
        2,
        "static_memory_policy",
        OneOf((0, 1, 2, 3, 4), enforced=False),
        "Memory allocation: 0 dynamic, 2 growing static shapes, 3 growing dynamic shapes, 4 both; 1 is 2.",
        _OWN_MEMORY,
        default=0,
        accepts_none=True,
    ),
    _memory(3, "memory_optimization_policy", Text(), "Policy for saving memory.", _OWN_MEMORY),
    _memory(
        4,
        "variable_use_1g_huge_page",
        OneOf((0, 1, 2)),
        "Pages of variables: 0 default, 1 only 1 GiB, 2 1 GiB or else 2 MiB.",
        _OWN_MEMORY,
        default=0,
        accepts_none=True,
    ),
    _session(
        1,
        "use_off_line",
        Boolean(),
        "False runs the session as if this package were not there.",
        works("False leaves the session without any effect of the other options."),
        default=True,
    ),
    _session(
        2, "in_out_pair_flag", Boolean(), "Whether in_out_pair names what runs on the device.", _NO_DEVICE, default=True
    ),
    _session(
        3,
        "in_out_pair",
        Text(says="the text of a list [[in_nodes, out_nodes]]"),
        "Nodes between which the graph runs on the device; needs mix_compile_mode.",
        _NO_DEVICE,
    ),
    _session(
        4,
        "auto_tune_mode",
        Text(),
        "Old tuning switch.",
        recorded("No tuning takes place. NPURunConfig takes the keyword too, with a warning."),
        former_owner=RUN_CONFIG,
        status="undocumented",
    ),
    _session(
        5,
        "graph_exec_timeout",
        Integer(),
        "Milliseconds a graph may run.",
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
        "Task type of this process; written from TF_CONFIG.",
        recorded("TensorFlow reads TF_CONFIG itself."),
        default="localhost",
    ),
    _session(
        9,
        "task_index",
        Integer(0),
        "Task index of this process; written from TF_CONFIG.",
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
