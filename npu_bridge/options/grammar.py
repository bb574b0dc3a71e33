"""Parses option values that are texts with a syntax of their own, such as step ranges or input shapes.

All functions are pure: they take a text and return a value, or raise ValueError. The message is only the reason; the
caller adds the option, and the object that got the option.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

MOST_DUMP_FIELDS = 100
MOST_DYNAMIC_PROFILES = 256  # the largest number any documented device takes

_RATIO_LIMITS = {"step": ("0.2", "0.9"), "loss": ("1.01", "1.5")}
_DEFAULT_RATIOS = {"step": "0.9", "loss": "1.05"}
_LOW_PRECISION_DTYPES = {"fast": "float16", "fast1": "bfloat16"}
_DECIMAL = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)")
_WHOLE = re.compile(r"[0-9]+")
_DIMENSION = re.compile(r"-?[0-9]+")


class AccelerateTrainMode(NamedTuple):
    """The dtype of a training's first, low-precision part, and the condition that ends this part.

    Attributes:
      low_dtype: "float16" or "bfloat16".
      trigger: "step" (a fraction of the total steps) or "loss" (a multiple of the target loss).
      ratio: the fraction or multiple, rounded to float32.
    """

    low_dtype: str
    trigger: str
    ratio: float


def parse_accelerate_train_mode(text: str | None) -> AccelerateTrainMode | None:
    """Reads `accelerate_train_mode`: `fast|step`, `fast1|loss|1.2`, ...

    Args:
      text: two or three fields separated by `|`: `fast` or `fast1`; `step` or `loss`; a ratio. For `step`, the ratio is
        from 0.2 to 0.9, by default 0.9. For `loss`, it is from 1.01 to 1.5, by default 1.05. The limits themselves are
        allowed; ratios are compared in float32.
    Returns:
      The parsed mode; None if the text is None or empty, which turns the feature off.
    """
    if not text:
        return None
    fields = text.split("|")
    if len(fields) not in (2, 3):
        raise ValueError(f"it has {len(fields)} fields separated by '|', not 2 or 3")
    acceleration, trigger = fields[:2]
    if acceleration not in _LOW_PRECISION_DTYPES:
        raise ValueError(f"its first field is {acceleration!r}, not 'fast' or 'fast1'")
    if trigger not in _RATIO_LIMITS:
        raise ValueError(f"its second field is {trigger!r}, not 'step' or 'loss'")
    ratio_text = (fields[2] if len(fields) == 3 else "") or _DEFAULT_RATIOS[trigger]
    if not _DECIMAL.fullmatch(ratio_text):
        raise ValueError(f"its ratio {ratio_text!r} is not a decimal number")
    import numpy as np  # imported late: the launcher also reads options, and must start at once

    ratio = np.float32(ratio_text)
    low, high = _RATIO_LIMITS[trigger]
    if not np.float32(low) <= ratio <= np.float32(high):
        raise ValueError(f"its ratio {ratio_text} is outside {low}..{high}, the limits for {trigger!r}")
    return AccelerateTrainMode(_LOW_PRECISION_DTYPES[acceleration], trigger, float(ratio))


def parse_dump_step(text: str) -> tuple[tuple[int, int], ...]:
    """Reads `dump_step`: `0|5|10-20` becomes ((0, 0), (5, 5), (10, 20)). Both ends of a range are included."""
    fields = text.split("|")
    if len(fields) > MOST_DUMP_FIELDS:
        raise ValueError(f"it has {len(fields)} fields, more than {MOST_DUMP_FIELDS}")
    return tuple(_parse_step_range(field) for field in fields)


def _parse_step_range(field: str) -> tuple[int, int]:
    ends = field.split("-")
    if len(ends) > 2 or not all(_WHOLE.fullmatch(end) for end in ends):
        raise ValueError(f"{field!r} is neither a step nor a range such as 3-7")
    first, last = int(ends[0]), int(ends[-1])
    if len(ends) == 2 and first >= last:
        raise ValueError(f"its range {field!r} does not increase")
    return first, last


def parse_input_shape(text: str) -> dict[str, tuple[int, ...]]:
    """Reads `input_shape`: `data:-1,3;mask:-1` becomes {"data": (-1, 3), "mask": (-1,)}."""
    shapes: dict[str, tuple[int, ...]] = {}
    for part in text.split(";"):
        name, colon, dims = part.rpartition(":")
        if not colon or not name:
            raise ValueError(f"its part {part!r} is not name:d,d,...")
        if name in shapes:
            raise ValueError(f"it names {name!r} twice")
        for dim in dims.split(","):
            if not _DIMENSION.fullmatch(dim):
                raise ValueError(f"its part {part!r} has the dimension {dim!r}, which is not a whole number")
        shapes[name] = tuple(map(int, dims.split(",")))
    return shapes


def parse_dynamic_dims(text: str) -> tuple[tuple[int, ...], ...]:
    """Reads `dynamic_dims`: `2,4;5,7` becomes ((2, 4), (5, 7)), one tuple for each of 2 to 256 profiles."""
    profiles = []
    for part in text.split(";"):
        if not all(_WHOLE.fullmatch(dim) for dim in part.split(",")):
            raise ValueError(f"its profile {part!r} is not a comma-separated list of whole numbers")
        profiles.append(tuple(int(dim) for dim in part.split(",")))
    if not 2 <= len(profiles) <= MOST_DYNAMIC_PROFILES:
        raise ValueError(f"it has {len(profiles)} profiles, not 2..{MOST_DYNAMIC_PROFILES}")
    if len({len(profile) for profile in profiles}) > 1:
        raise ValueError("its profiles differ in length")
    return tuple(profiles)


def parse_device_list(text: str) -> tuple[int, ...]:
    """Reads `local_device_list`: `0,1` becomes (0, 1)."""
    if not all(_WHOLE.fullmatch(part) for part in text.split(",")):
        raise ValueError("it is not a comma-separated list of device numbers")
    return tuple(int(part) for part in text.split(","))


def parse_profiling_options(text: str) -> dict[str, Any]:
    """Reads `profiling_options`, a JSON object in a string."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON ({error})") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"it holds a JSON {type(parsed).__name__}, not an object")
    return parsed


def parse_stream_limits(text: str) -> dict[str, int]:
    """Reads `stream_max_parallel_num`: `DNN_VM_AICPU:10,AIcoreEngine`. A missing number means 1."""
    limits = {}
    for part in text.split(","):
        engine, _, streams = part.partition(":")
        if engine not in ("DNN_VM_AICPU", "AIcoreEngine") or not _WHOLE.fullmatch(streams or "1"):
            raise ValueError(f"its part {part!r} is not DNN_VM_AICPU:n or AIcoreEngine:n")
        limits[engine] = int(streams or "1")
    return limits


def parse_core_numbers(text: str) -> tuple[int, int]:
    """Reads `aicore_num`: `24|48` becomes (24, 48), cube cores and vector cores."""
    parts = text.split("|")
    if len(parts) != 2 or not all(_WHOLE.fullmatch(part) and int(part) > 0 for part in parts):
        raise ValueError("it is not two positive numbers separated by '|'")
    return int(parts[0]), int(parts[1])


def parse_multistream_mode(text: str) -> tuple[str, int]:
    """Reads `auto_multistream_parallel_mode`: `cv`, `LoadBalance:4`, `MainStream:4` (1 to 64 streams)."""
    name, colon, streams = text.partition(":")
    if text == "cv":
        return "cv", 1
    if text == "LoadBalance":
        return "LoadBalance", 8
    if name in ("LoadBalance", "MainStream") and _WHOLE.fullmatch(streams) and 1 <= int(streams) <= 64:
        return name, int(streams)
    raise ValueError("it is not cv, LoadBalance:n or MainStream:n with n in 1..64")
