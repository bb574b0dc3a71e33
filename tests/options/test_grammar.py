from __future__ import annotations

import numpy as np
import pytest

from npu_bridge.options import grammar
from npu_bridge.options.grammar import AccelerateTrainMode, parse_accelerate_train_mode


@pytest.mark.parametrize(
    "text, plan",
    [
        (None, None),
        ("fast|step", ("float16", "step", 0.9)),
        ("fast|step|", ("float16", "step", 0.9)),
        ("fast1|loss", ("bfloat16", "loss", 1.05)),
        ("fast|loss|1.01", ("float16", "loss", 1.01)),
    ],
)
def test_acceleration_plan(text, plan):
    expected = plan and AccelerateTrainMode(plan[0], plan[1], float(np.float32(plan[2])))
    assert parse_accelerate_train_mode(text) == expected


@pytest.mark.parametrize(
    "parse, text",
    [
        (grammar.parse_dump_step, "\u0661"),
        (grammar.parse_dump_step, "5-5"),
        (grammar.parse_input_shape, "a:1;a:2"),
        (grammar.parse_dynamic_dims, ";".join(["1"] * 257)),
        (grammar.parse_device_list, "0,"),
        (grammar.parse_profiling_options, "[" * 100000),
        (grammar.parse_stream_limits, "GPU:1"),
        (grammar.parse_core_numbers, "0|1"),
        (grammar.parse_multistream_mode, "MainStream:65"),
        (grammar.parse_multistream_mode, "MainStream"),
    ],
)
def test_illegal_text_is_a_value_error(parse, text):
    with pytest.raises(ValueError, match="it"):
        parse(text)
