"""Checks arguments: numbers, counts, switches, words, types and lists.

Each check returns the value as a plain Python object. It raises TypeError for a wrong type, and ValueError for any
other fault. The error names the argument, the expected value, the given value, and the cure.

In all functions, `owner` is the class or function that was called, `name` the argument, and `fix` a sentence with the
cure, for faults whose cure the check does not know.
"""

from __future__ import annotations

import inspect
import math
import numbers
import re
from collections.abc import Iterable, Mapping
from typing import Any, Callable

from npu_bridge.base.errors import did_you_mean, message, shown

_IN_RANGE = "Choose a number in this range."


def is_number(value: Any) -> bool:
    """Returns True for real numbers of Python and numpy, not for booleans."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_integer(value: Any) -> bool:
    """Returns True for integers of Python and numpy, not for booleans."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_number(
    owner: str,
    name: str,
    value: Any,
    fix: str = "",
    *,
    above: float = -math.inf,
    at_least: float | None = None,
    below: float = math.inf,
    at_most: float | None = None,
) -> float:
    """Returns a finite number within bounds; `at_least` and `at_most` include the bound itself."""
    low = f"{above:g} <" if at_least is None else f"{at_least:g} <="
    high = f"< {below:g}" if at_most is None else f"<= {at_most:g}"
    expected = f"{low} {name} {high}"
    if not is_number(value):
        fix = quoted_number_fix(value, float) or fix or "Pass a number."
        raise TypeError(message(owner, f"{name} is not a number", expected, shown(value), fix))
    try:
        number = float(value)
    except OverflowError:  # an integer larger than any float
        number = math.inf
    # Bounds as Python floats: numpy 2 would round the number to the type of a bound like `tf.float32.max`, and warn.
    is_above = number > above if at_least is None else number >= float(at_least)
    if not is_above or not (number < below if at_most is None else number <= float(at_most)):
        raise ValueError(message(owner, f"{name} is out of range", expected, shown(value), fix or _IN_RANGE))
    return number


def check_count(
    owner: str,
    name: str,
    value: Any,
    fix: str = "",
    *,
    at_least: int | None = 1,
    at_most: int | None = None,
    value_text: str = "a whole number",
) -> int:
    """Returns an integer within bounds; the message describes the expected integer by `value_text`."""
    bounds = (f"{word} {bound}" for word, bound in (("at least", at_least), ("at most", at_most)) if bound is not None)
    expected = ", ".join(filter(None, (value_text, " and ".join(bounds))))
    if not is_integer(value):
        fix = quoted_number_fix(value, int) or fix or "Pass an int."
        raise TypeError(message(owner, f"{name} is not an integer", expected, shown(value), fix))
    if (at_least is not None and value < at_least) or (at_most is not None and value > at_most):
        raise ValueError(message(owner, f"{name} is out of range", expected, shown(value), fix or _IN_RANGE))
    return int(value)


def quoted_number_fix(value: Any, kind: type) -> str:
    """Returns the cure for an `int` or `float` that was given as text; an empty text for any other value."""
    try:
        is_right = isinstance(value, str) and len(value) < 40 and math.isfinite(kind(value))
    except ValueError:
        is_right = False
    return f"Write {value.strip()}, without quotes." if is_right else ""


def check_switch(
    owner: str, name: str, value: Any, fix: str = "Pass True or False.", *, takes_numbers: bool = False
) -> bool:
    """Returns True or False for a boolean of Python or numpy; with `takes_numbers` also for 1 or 0."""
    is_boolean = type(value).__name__ in ("bool", "bool_")  # by name, because numpy might not be loaded
    if not is_boolean and not (takes_numbers and is_integer(value) and value in (0, 1)):
        raise TypeError(message(owner, f"{name} is not a boolean", "True or False", shown(value), fix))
    return bool(value)


def check_choice(
    owner: str, name: str, value: Any, choices: Iterable[str], fix: str = "Choose an expected value."
) -> str:
    """Returns a value that is one of `choices`; the error for other values suggests the nearest choice, or `fix`."""
    choices = list(choices)
    if not isinstance(value, str) or value not in choices:
        expected = " or ".join(filter(None, (", ".join(map(repr, choices[:-1])), repr(choices[-1]))))
        fix = did_you_mean(value, choices if isinstance(value, str) else (), fix)
        raise ValueError(message(owner, f"{name} has an unknown value", expected, shown(value), fix))
    return value


def check_instance(
    owner: str, name: str, value: Any, kind: type | tuple, value_text: str, fix: str, expected: str = ""
) -> Any:
    """Returns a value that is an instance of `kind`; messages describe such a value by `value_text` and `expected`."""
    if not isinstance(value, kind):
        raise TypeError(message(owner, f"{name} is not {value_text}", expected or value_text, shown(value), fix))
    return value


def check_list(owner: str, name: str, value: Any, fix: str, value_text: str = "a list", expected: str = "") -> list:
    """Returns a list from any iterable except texts and dictionaries; other arguments as in `check_instance`."""
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__iter__"):
        raise TypeError(message(owner, f"{name} is not {value_text}", expected or value_text, shown(value), fix))
    return list(value)


def check_texts(owner: str, name: str, value: Any, fix: str) -> list[str]:
    """Returns the items of an iterable as a list, if all of them are texts."""
    texts = check_list(owner, name, value, fix, "a list of texts")
    if not all(isinstance(text, str) for text in texts):
        raise TypeError(message(owner, f"{name} is not a list of texts", "a list of texts", shown(value), fix))
    return texts


def check_pattern(owner: str, name: str, value: Any) -> str:
    """Returns a valid regular expression; raises ValueError with the reason for any other value."""
    try:
        re.compile(value)
    except (re.error, TypeError) as error:
        problem, fix = f"{name} cannot be read ({error})", "Escape special characters with a backslash."
        raise ValueError(message(owner, problem, "a regular expression", shown(value), fix)) from error
    return value


def has_required_argument(function: Callable) -> bool:
    """Returns whether a function must be called with a positional argument; False if its signature is unknown."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(parameter.default is parameter.empty and parameter.kind in positional for parameter in parameters)
