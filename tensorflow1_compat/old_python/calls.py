"""Handles code of the user's files that newer versions refuse, or execute differently.

These are removed methods, lists as indices of arrays, and `float` and `%` with arrays.
"""

from __future__ import annotations

import ast
import functools
import os
import pkgutil
import re
import sys
import types
from typing import Any

from tensorflow1_compat.journal import say_once
from tensorflow1_compat.old_python.removed_names import GONE_METHODS

__all__ = [
    "OLD_METHODS",
    "OLD_MODES",
    "OldIndices",
    "with_old_method",
    "numpy_version",
    "find_old_mode",
    "element_or_value",
    "without_one_element_arrays",
]

OLD_METHODS = frozenset(key.rpartition(".")[2] for key in GONE_METHODS)
# Modes of `open` for universal newlines, until Python 3.10; text modes have them anyway since Python 3.0.
OLD_MODES = frozenset({"U", "Ub", "Ur", "Urb", "bU", "rU", "rUb", "rbU", "rtU"})
_NUMPY = re.compile(r"^numpy-(\d+)\.(\d+).*\.(?:dist|egg)-info$", re.MULTILINE)
_CONVERSION = re.compile(r"%(?:\((.*?)\))?[-#0 +]*(\*|\d*)(\.\*|\.\d*)?[hlL]?([a-zA-Z%])")
_PLAIN = frozenset({bool, float, int, str})
_NUMBERS = "refused since numpy 2.4; its only element is used, as before"


@functools.cache
def numpy_version() -> tuple[int, int]:
    """Returns (major, minor) of the installed numpy from its folder's name, without imports; (0, 0) without numpy."""
    for folder in filter(os.path.isdir, sys.path):
        found = _NUMPY.search("\n".join(os.listdir(folder)))
        if found is not None:
            return int(found[1]), int(found[2])
    return 0, 0


def find_old_mode(call: ast.Call) -> ast.Constant | None:
    """Returns the mode argument of a call of `open` if it is a removed mode (`OLD_MODES`); else None."""
    if getattr(call.func, "attr", getattr(call.func, "id", None)) != "open":
        return None
    given = [*call.args[1:2], *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
    return next((one for one in given if isinstance(one, ast.Constant) and one.value in OLD_MODES), None)


def with_old_method(value: Any, name: str) -> Any:
    """Returns the object; if its class has lost the named method, returns a stand-in that has only this method."""
    if hasattr(value, name):
        return value
    is_class = isinstance(value, type)
    of = value if is_class else type(value.__self__ if isinstance(value, super) else value)
    for kind in of.__mro__:
        full = f"{kind.__module__}.{kind.__qualname__}.{name}"
        if full in GONE_METHODS:
            break
    else:
        return value
    place = GONE_METHODS[full]
    say_once(full, f"gone; {place.replace(':', '.')} is used")
    if ":" not in place:
        return types.SimpleNamespace(**{name: getattr(value, place)})
    function = pkgutil.resolve_name(place)
    return types.SimpleNamespace(**{name: function if is_class else types.MethodType(function, value)})


def element_or_value(value: Any) -> Any:
    """Returns the argument for `float` or `int`: the element of an array with one element, else the value itself."""
    if type(value) in _PLAIN:
        return value
    if _is_single_element_array(value):
        say_once("float or int of an array with an axis", _NUMBERS)
        return value.item()
    return value


def without_one_element_arrays(values: Any, text: str) -> Any:
    """Returns the values for `text % values`; where the text needs numbers, replaces one-element arrays by numbers."""
    several = values.values() if isinstance(values, dict) else values if isinstance(values, tuple) else [values]
    if not any(map(_is_single_element_array, several)):
        return values
    say_once("text % an array with an axis", _NUMBERS)
    names, kinds = [], []
    for name, width, precision, kind in _CONVERSION.findall(text):
        if kind != "%":
            names.append(name)
            kinds += ["d"] * (width + precision).count("*") + [kind]
    if isinstance(values, dict):
        numbers = {name for name, kind in zip(names, kinds) if kind not in "sra"}
        return {
            key: value.item() if key in numbers and _is_single_element_array(value) else value
            for key, value in values.items()
        }
    if len(several) != len(kinds):
        return values  # Python reports this error
    found = [
        value.item() if kind not in "sra" and _is_single_element_array(value) else value
        for value, kind in zip(several, kinds)
    ]
    return tuple(found) if isinstance(values, tuple) else found[0]


def _is_single_element_array(value: Any) -> bool:
    return type(value).__module__.startswith("numpy") and getattr(value, "ndim", 0) > 0 and value.size == 1


class OldIndices:
    """An array whose index can be a list that counts as a tuple, as until numpy 1.22: `x[[rows, columns]]`.

    Such a list has a sequence, slice, None or Ellipsis inside. Since then, it is made one array.
    """

    def __init__(self, array: Any):
        self._array = array

    def __getitem__(self, index: Any) -> Any:
        return self._array[self._convert(index)]

    def __setitem__(self, index: Any, value: Any) -> None:
        self._array[self._convert(index)] = value

    def _convert(self, index: Any) -> Any:
        if not isinstance(index, list) or not any(map(_makes_tuple, index)):
            return index
        if sum(part is not None and part is not ... for part in index) > self._array.ndim:
            return index  # was an error
        say_once("x[[i, j]] of an array", "one index array since numpy 1.23; the list is made a tuple, as before")
        return tuple(index)


def _makes_tuple(part: Any) -> bool:
    is_sequence = hasattr(part, "__len__") and not isinstance(part, (str, bytes))
    return is_sequence or part is None or part is ... or isinstance(part, slice)
