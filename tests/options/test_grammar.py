from __future__ import annotations

import numpy as np
import pytest

from npu_bridge.options import grammar
from npu_bridge.options.grammar import AccelerateTrainMode, parse_accelerate_train_mode


@pytest.mark.parametrize(
    "text, plan",
    [
        (None, None),
        ("", None),
        ("fast|step", ("float16", "step", 0.9)),
        ("fast|step|", ("float16", "step", 0.9)),
        ("fast1|loss", ("bfloat16", "loss", 1.05)),
        ("fast1|step|0.2", ("bfloat16", "step", 0.2)),
        ("fast|loss|1.5", ("float16", "loss", 1.5)),
        ("fast|loss|1.01", ("float16", "loss", 1.01)),
    ],
)
def test_acceleration_plan(text, plan):
    expected = plan and AccelerateTrainMode(plan[0], plan[1], float(np.float32(plan[2])))
    assert parse_accelerate_train_mode(text) == expected


@pytest.mark.parametrize(
    "parse, text, value",
    [
        (grammar.parse_dump_step, "0|5|10-20", ((0, 0), (5, 5), (10, 20))),
        (grammar.parse_input_shape, "a:-1,3;b/c:0:4", {"a": (-1, 3), "b/c:0": (4,)}),
        (grammar.parse_dynamic_dims, "2,4;5,7", ((2, 4), (5, 7))),
        (grammar.parse_device_list, "0,1", (0, 1)),
        (grammar.parse_profiling_options, '{"output": "x"}', {"output": "x"}),
        (
            grammar.parse_stream_limits,
            "DNN_VM_AICPU:10,AIcoreEngine",
            {"DNN_VM_AICPU": 10, "AIcoreEngine": 1},
        ),
        (grammar.parse_core_numbers, "24|48", (24, 48)),
        (grammar.parse_multistream_mode, "cv", ("cv", 1)),
        (grammar.parse_multistream_mode, "LoadBalance", ("LoadBalance", 8)),
        (grammar.parse_multistream_mode, "MainStream:64", ("MainStream", 64)),
    ],
)
def test_legal_text_is_read(parse, text, value):
    assert parse(text) == value


@pytest.mark.parametrize(
    "parse, text",
    [
        (grammar.parse_dump_step, "\u0661"),
        (grammar.parse_input_shape, "a:1;a:2"),
        (grammar.parse_dynamic_dims, ";".join(["1"] * 257)),
        (grammar.parse_device_list, "0,"),
        (grammar.parse_profiling_options, "[" * 100000),
        (grammar.parse_stream_limits, "GPU:1"),
        (grammar.parse_core_numbers, "0|1"),
        (grammar.parse_core_numbers, "1"),
        (grammar.parse_multistream_mode, "MainStream:65"),
        (grammar.parse_multistream_mode, "MainStream"),
    ],
)
def test_illegal_text_is_a_value_error(parse, text):
    with pytest.raises(ValueError, match="it"):
        parse(text)
