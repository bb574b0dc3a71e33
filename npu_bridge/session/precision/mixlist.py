"""`modify_mixlist`: reads a file that moves operator types between the lists of mixed precision.

    {
      // which types keep their dtype, and which may be reduced
      "black-list": {"to-add": ["Relu"], "to-remove": ["Softmax"]},
      "white-list": {"to-add": ["AddV2"], "to-remove": ["Conv2D"]}
    }

A type is *allowed* (may be reduced), *denied* (is never reduced) or *following* (follows the operators before it).
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from npu_bridge.base.errors import did_you_mean, message
from npu_bridge.base.reading import open_file

_LISTS = ("black-list", "white-list")
_CHANGES = ("to-add", "to-remove")
# Strings are matched first, so that "//" inside one is no comment.
_STRING_OR_COMMENT = re.compile(r'("(?:[^"\\]|\\.)*")|//[^\n]*')


class Mixlist(NamedTuple):
    """The operator types in each list; a type is in at most one list."""

    allowed: frozenset[str] = frozenset()
    denied: frozenset[str] = frozenset()
    following: frozenset[str] = frozenset()


def read_mixlist(path: str) -> Mixlist:
    """Reads a mixlist file.

    Args:
      path: path of a JSON file, which can hold `//` comments.
    Raises:
      ValueError: the file cannot be read, is not JSON, has unknown keys, has values that are not lists of names, or
        contradicts itself about a type.
    """
    try:
        with open_file(path) as file:
            content = json.loads(_STRING_OR_COMMENT.sub(lambda match: match.group(1) or "", file.read()))
    except OSError as reason:
        raise _file_error(path, "the file cannot be read", "a JSON file", str(reason), "Correct the path.") from reason
    except (ValueError, RecursionError) as reason:
        raise _file_error(path, "the file is not JSON", "a JSON object", str(reason), "Correct this place.") from reason
    names = {}
    lists = _check_object(path, "the file", content, _LISTS)
    for name in _LISTS:
        changes = _check_object(path, name, lists.get(name, {}), _CHANGES)
        for change in _CHANGES:
            names[name, change] = _read_type_names(path, f"{name}.{change}", changes.get(change, []))
    return _sort_types(path, names)


def _sort_types(path: str, names: dict[tuple[str, str], frozenset[str]]) -> Mixlist:
    denied, allowed = (names[name, "to-add"] for name in _LISTS)
    undenied, unallowed = (names[name, "to-remove"] for name in _LISTS)
    for contrary, what in (
        (denied & allowed, "in to-add of both lists"),
        (denied & undenied, "in to-add and to-remove of black-list"),
        (allowed & unallowed, "in to-add and to-remove of white-list"),
    ):
        if contrary:
            raise _file_error(
                path, f"{min(contrary)} is {what}", "one change for each type", "two changes", "Remove one."
            )
    return Mixlist(allowed, denied, (undenied | unallowed) - allowed - denied)


def _check_object(path: str, name: str, value: Any, keys: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _file_error(path, f"{name} is not an object", "a JSON object", type(value).__name__, "Write {...}.")
    for key in value:
        if key not in keys:
            fix = did_you_mean(key, keys, "Remove it.")
            raise _file_error(path, f"{name} has an unknown key", " or ".join(map(repr, keys)), repr(key), fix)
    return value


def _read_type_names(path: str, name: str, value: Any) -> frozenset[str]:
    # A comma would end the name where TensorFlow reads the lists.
    if not isinstance(value, list) or not all(isinstance(part, str) and part.isidentifier() for part in value):
        raise _file_error(
            path, f"{name} is not a list of types", "a list of operator types", repr(value), "Correct it."
        )
    return frozenset(value)


def _file_error(path: str, problem: str, expected: str, got: str, fix: str) -> ValueError:
    return ValueError(message(f"modify_mixlist {path!r}", problem, expected, got, fix))
