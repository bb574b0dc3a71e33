"""`customize_dtypes`: reads a file that sets the dtype of single operators, or of all operators of a type.

# by name, which wins, and by type
dense/MatMul::InputDtype:float32,float32,OutputDtype:float32
OpType::MatMulV2:InputDtype:float16,float16,float32,OutputDtype:float32

If a rule names one dtype for all floating-point inputs and outputs, the operator computes in this dtype. If the dtypes
differ, the operator computes in float32, and values for which the rule names a 16-bit dtype are rounded; for example, a
product of float16 values with float32 sums.
"""

from __future__ import annotations

import logging
import re
from typing import NamedTuple

from npu_bridge.base.errors import message, say_once
from npu_bridge.base.reading import open_file
from npu_bridge.base.tf_internals.graphs import operator_definition

_RULE = re.compile(
    r"(OpType::(?P<type>[^:\s]+):|(?P<name>[^:\s]+)::)\s*"
    r"(?P<first>(?:[a-z]+\d*\s*,\s*)*)InputDtype:(?P<input>.*?),?\s*OutputDtype:(?P<output>.*)"
)
_DTYPES = {"float16": "float16", "fp16": "float16", "bfloat16": "bfloat16", "bf16": "bfloat16"}
_DTYPES.update({"float32": "float32", "fp32": "float32", "float": "float32"})
# Inputs that are not floating numbers can be listed too; their dtypes have no effect.
_OTHERS = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "string")
# Operators for which an NPU's compiler has other names, that differ in more than a V2 or a D at the end.
_OTHER_TYPES = {
    "DepthwiseConv2D": "DepthwiseConv2dNative",
    "DepthwiseConv2DBackpropFilter": "DepthwiseConv2dNativeBackpropFilter",
    "DepthwiseConv2DBackpropInput": "DepthwiseConv2dNativeBackpropInput",
    "Conv2DTranspose": "Conv2DBackpropInput",
    "Conv3DTranspose": "Conv3DBackpropInputV2",
}


class Rounding(NamedTuple):
    """The dtypes to which inputs and outputs of an operator are rounded, by position; None means no rounding."""

    inputs: tuple[str | None, ...]
    outputs: tuple[str | None, ...]


class OperatorDtypes(NamedTuple):
    """The rules of a file.

    Attributes:
      by_name, by_type: the dtype in which operators compute ("float32", "float16" or "bfloat16"), by operator name and
        by TensorFlow's operator type.
      rounding_by_name, rounding_by_type: the rounding of operators for which a rule names different dtypes.
    """

    by_name: dict[str, str]
    by_type: dict[str, str]
    rounding_by_name: dict[str, Rounding]
    rounding_by_type: dict[str, Rounding]

    @property
    def has_rounding(self) -> bool:
        """Whether any rule rounds inputs or outputs."""
        return bool(self.rounding_by_name or self.rounding_by_type)


def read_operator_dtypes(path: str) -> OperatorDtypes:
    """Reads a file of rules.

    Operator types of an NPU's compiler (`MatMulV2`, `Conv2DBackpropInputD`) can be used. If such a type has more inputs
    than TensorFlow's type, the dtypes of the last inputs, such as a bias, are ignored.

    Raises:
      ValueError: the file cannot be read, a line is not a rule, or a dtype is unknown.
    """
    read = OperatorDtypes({}, {}, {}, {})
    exact: set[str] = set()
    try:
        with open_file(path) as file:
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
            raise ValueError(message(where, "it is not a rule", expected, repr(text), "Correct the line."))
        dtype, rounding = _resolve_rule(where, f"{rule['first']}{rule['input']}", rule["output"])
        key, dtypes, roundings = rule["name"], read.by_name, read.rounding_by_name
        if rule["type"]:
            key, dtypes, roundings = _tensorflow_type(rule["type"]), read.by_type, read.rounding_by_type
            if key in exact and key != rule["type"]:
                continue  # a rule for TensorFlow's own type was read before
            exact.update({key} & {rule["type"]})
        dtypes[key] = dtype
        roundings.pop(key, None)
        if rounding is not None:
            roundings[key] = rounding
    return read


def _resolve_rule(where: str, inputs: str, outputs: str) -> tuple[str, Rounding | None]:
    """Returns the dtype in which an operator computes, and, for a rule with several dtypes, the rounding, else None."""
    asked = Rounding(_parse_dtypes(where, inputs), _parse_dtypes(where, outputs))
    dtypes = {dtype for dtype in (*asked.inputs, *asked.outputs) if dtype is not None}
    if not dtypes:
        got = repr(f"{inputs} {outputs}")
        raise ValueError(
            message(where, "it names no dtype", "one of float32, float16, bfloat16", got, "Name a floating dtype.")
        )
    if len(dtypes) == 1:
        return dtypes.pop(), None
    return "float32", Rounding(*(tuple(None if word == "float32" else word for word in words) for words in asked))


def _parse_dtypes(where: str, text: str) -> tuple[str | None, ...]:
    """Parses a list of dtypes; the result has None in place of a dtype that is not floating-point."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in _DTYPES and word not in _OTHERS:
            expected = "float32, float16, bfloat16 or the dtype of an input that is not a floating number"
            raise ValueError(message(where, f"{word!r} is not a dtype", expected, repr(text), "Correct the word."))
    return tuple(_DTYPES.get(word) for word in words)


def _tensorflow_type(name: str) -> str:
    """Returns TensorFlow's name of an operator type; if it has none, logs a line and returns `name`."""
    shorter = re.sub(r"(V\d+)?D?$", "", name)
    for candidate in (name, re.sub("D$", "", name), shorter, _OTHER_TYPES.get(name), _OTHER_TYPES.get(shorter)):
        if candidate and operator_definition(candidate) is not None:
            return candidate
    say_once(logging.INFO, f"customize_dtypes: TensorFlow has no operators of type {name}; its rule changes nothing.")
    return name
