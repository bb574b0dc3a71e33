"""`customize_dtypes`: a file that says the dtype of single operators, or of all of one type.

# by name, which wins, and by type
dense/MatMul::InputDtype:float32,float32,OutputDtype:float32
OpType::Softmax:InputDtype:float32,OutputDtype:float32
"""

from __future__ import annotations

import re
from typing import NamedTuple

from npu_bridge.options.errors import message

_RULE = re.compile(
    r"(OpType::(?P<type>[^:\s]+):|(?P<name>[^:\s]+)::)InputDtype:(?P<input>.*?),?\s*OutputDtype:(?P<output>.*)"
)
_DTYPES = {"float16": "float16", "fp16": "float16", "bfloat16": "bfloat16", "bf16": "bfloat16"}
_DTYPES.update({"float32": "float32", "fp32": "float32", "float": "float32"})
# Inputs that are no floating numbers may be listed too; nothing is asked of them.
_OTHERS = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "string")


class OperatorDtypes(NamedTuple):
    """The dtype asked for, "float32", "float16" or "bfloat16", by operator name and by operator type."""

    by_name: dict[str, str]
    by_type: dict[str, str]


def read_operator_dtypes(path: str) -> OperatorDtypes:
    """Reads such a file.

    Raises:
      ValueError: the file cannot be read, a line is no rule, a dtype is unknown, or one rule asks for several
        floating dtypes: TensorFlow's kernels have one.
    """
    by_name: dict[str, str] = {}
    by_type: dict[str, str] = {}
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as reason:
        raise ValueError(
            message(f"customize_dtypes {path!r}", "it cannot be read", "a text file", str(reason), "Correct the path.")
        ) from reason
    for number, line in enumerate(lines, start=1):
        text = line.split("#", 1)[0].strip()
        if not text:
            continue
        where = f"customize_dtypes {path!r} line {number}"
        rule = _RULE.fullmatch(text)
        if not rule:
            expected = "NAME::InputDtype:...,OutputDtype:... or OpType::TYPE:InputDtype:...,OutputDtype:..."
            raise ValueError(message(where, "it is no rule", expected, repr(text), "Correct the line."))
        dtype = _one_dtype(where, f"{rule['input']},{rule['output']}")
        if rule["type"]:
            by_type[rule["type"]] = dtype
        else:
            by_name[rule["name"]] = dtype
    return OperatorDtypes(by_name, by_type)


def _one_dtype(where: str, text: str) -> str:
    words = [word.strip() for word in text.split(",")]
    words = [word for word in words if word and word not in _OTHERS]
    unknown = [word for word in words if word not in _DTYPES]
    dtypes = {_DTYPES[word] for word in words if word not in unknown}
    if unknown or len(dtypes) != 1:
        problem = f"{unknown[0]!r} is no dtype" if unknown else "it asks for several dtypes or none"
        raise ValueError(
            message(where, problem, "one of float32, float16, bfloat16", repr(text), "Use the same dtype throughout.")
        )
    return dtypes.pop()
