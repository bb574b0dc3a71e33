"""Defines the kinds of option values (integer, choice, path and so on): the accepted values and their form in sessions.

A kind finds the problem with a value and describes the expected values, for messages and the documentation page. It
converts a legal value into the plain form that other code reads (`str`, `int`, `bool`). Limits that the NPU stack
documents but never enforces are `enforced=False`: a value outside of them is kept, with a warning.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Callable, NamedTuple

from npu_bridge.base.arguments import is_number, quoted_number_fix
from npu_bridge.base.errors import did_you_mean

_INT64_LIMITS = (-(2**63), 2**63 - 1)
_FITS_64_BITS = "Use a number that fits 64 bits, at most 2**63 - 1."


class ValueProblem(NamedTuple):
    """The problem with a value: exception type, cure, and whether the problem is an error or only a warning."""

    error: type[Exception]
    fix: str
    is_fatal: bool = True
    says: str = "has a value outside its range"


_NULL_BYTE = ValueProblem(
    ValueError, "Remove the null byte.", says="has a null byte, at which other programs end the text"
)


def _suggest_int(value: Any) -> str:
    """Returns what to write in place of a value that must be an `int`, for the message."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return f"Write {int(value)}."
    return quoted_number_fix(value, int) or "Pass an int."


class OptionKind:
    """The kind of an option that accepts any value; the base class of all other kinds."""

    session_field: str | None = None
    choices: tuple[Any, ...] = ()

    @property
    def expected(self) -> str:
        """The expected values, as a noun phrase."""
        return "any value"

    def find_problem(self, value: Any) -> ValueProblem | None:
        """Returns the problem with `value`, or None."""
        return None

    def normalise(self, value: Any) -> Any:
        """Returns the plain form of a legal value."""
        return value


@dataclass(frozen=True)
class Text(OptionKind):
    """`str` or `bytes` holding UTF-8 text.

    Attributes:
      choices: the legal texts; empty if any text is legal.
      parse: parses the text, and raises ValueError with the reason if it is illegal; None if there is no grammar.
      says: a description of the grammar.
      enforced: False if a text outside of `choices` or the grammar only causes a warning.
      refused: legal texts that raise an error because they have no equivalent here, each with the cure.
      instead: common illegal texts, each with its cure.
      only_str: whether `bytes` is a wrong type.
      wrong_type: the exception for a wrong type.
    """

    choices: tuple[str, ...] = ()
    parse: Callable[[str], Any] | None = None
    says: str = "text"
    enforced: bool = True
    refused: Mapping[str, str] = field(default_factory=dict)
    instead: Mapping[str, str] = field(default_factory=dict)
    only_str: bool = False
    wrong_type: type[Exception] = TypeError
    session_field = "s"

    @property
    def expected(self) -> str:
        usable = [repr(choice) for choice in self.choices if choice not in self.refused]
        return " or ".join(usable) or self.says

    def find_problem(self, value: Any) -> ValueProblem | None:
        if not isinstance(value, str if self.only_str else (str, bytes)):
            return ValueProblem(self.wrong_type, "Write it as a string.", says="has the wrong type")
        try:
            text = self.normalise(value)
            text.encode("utf-8")
        except UnicodeError:
            return ValueProblem(ValueError, "Encode it as UTF-8.")
        if "\0" in text:
            return _NULL_BYTE
        if text in self.refused:
            return ValueProblem(ValueError, self.refused[text], says="is refused here")
        if self.choices and text not in self.choices:
            fix = self.instead.get(text.lower()) or did_you_mean(text, self.choices, "Use one of these.")
            return ValueProblem(ValueError, fix, self.enforced, "is not an allowed value")
        if self.parse is not None:
            try:
                self.parse(text)
            except ValueError as reason:
                return ValueProblem(ValueError, f"Correct it: {reason}.", self.enforced, "does not follow the grammar")
        return None

    def normalise(self, value: Any) -> Any:
        return value.decode("utf-8") if isinstance(value, bytes) else value


@dataclass(frozen=True)
class StringifiedValue(OptionKind):
    """Any value; its `str()` is stored."""

    session_field = "s"
    expected = "anything, kept as text"

    def find_problem(self, value: Any) -> ValueProblem | None:
        try:
            self.normalise(value)
        except Exception:  # a number with very many digits, or an object whose own `str` fails
            return ValueProblem(ValueError, "Write it as a string.", says="has no text")
        return None

    def normalise(self, value: Any) -> Any:
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


@dataclass(frozen=True)
class RawBytes(OptionKind):
    """An option of `bytes` that must be empty, because other values have no equivalent here."""

    refusal: str = ""
    session_field = "s"
    expected = "no value"

    def find_problem(self, value: Any) -> ValueProblem | None:
        if not isinstance(value, bytes):
            return ValueProblem(TypeError, "Leave the option out; it accepts only bytes.", says="has the wrong type")
        if value:
            return ValueProblem(ValueError, self.refusal, says="is refused here")
        return None

    def normalise(self, value: Any) -> Any:
        return value.decode("utf-8", "replace")


@dataclass(frozen=True)
class Integer(OptionKind):
    """`int` between `low` and `high`, both included; not `bool`, which Python counts as an integer.

    Attributes:
      low, high: the limits; None for the limit of 64-bit integers.
      enforced: False if a value outside of the limits only causes a warning.
      clamps: whether a value outside of the limits is replaced by the nearest limit, with a warning.
    """

    low: int | None = None
    high: int | None = None
    enforced: bool = True
    clamps: bool = False
    session_field = "i"

    @property
    def expected(self) -> str:
        if self.low is not None and self.high is not None:
            return f"an integer in {self.low}..{self.high}"
        return "an integer" if self.low is None else f"an integer of at least {self.low}"

    def find_problem(self, value: Any) -> ValueProblem | None:
        if isinstance(value, bool):
            return ValueProblem(TypeError, f"Pass {int(value)}.", says="has the wrong type")
        if not isinstance(value, int):
            return ValueProblem(TypeError, _suggest_int(value), says="has the wrong type")
        if not _INT64_LIMITS[0] <= value <= _INT64_LIMITS[1]:
            return ValueProblem(ValueError, _FITS_64_BITS)
        if self._clamp(value) != value:
            fix = f"{self._clamp(value)} is used." if self.clamps else f"Use {self._clamp(value)}."
            return ValueProblem(ValueError, fix, self.enforced and not self.clamps)
        return None

    def normalise(self, value: Any) -> Any:
        return self._clamp(int(value)) if self.clamps else int(value)

    def _clamp(self, value: int) -> int:
        if self.low is not None:
            value = max(value, self.low)
        return value if self.high is None else min(value, self.high)


@dataclass(frozen=True)
class OneOf(OptionKind):
    """One of a few integers that do not form a range."""

    choices: tuple[int, ...] = ()
    enforced: bool = True
    session_field = "i"

    @property
    def expected(self) -> str:
        return " or ".join(str(choice) for choice in self.choices)

    def find_problem(self, value: Any) -> ValueProblem | None:
        wrong = Integer().find_problem(value)
        if wrong is None and value not in self.choices:
            return ValueProblem(ValueError, "Use one of these.", self.enforced, "is not an allowed value")
        return wrong

    def normalise(self, value: Any) -> Any:
        return int(value)


@dataclass(frozen=True)
class Boolean(OptionKind):
    """`bool`; the integers 0 and 1 are accepted, too, unless `only_bool` is set.

    Attributes:
      only_bool: whether an `int` is a wrong type.
      wrong_type: the exception for a wrong type.
    """

    only_bool: bool = False
    wrong_type: type[Exception] = TypeError
    session_field = "b"
    expected = "True or False"

    def find_problem(self, value: Any) -> ValueProblem | None:
        if not isinstance(value, bool if self.only_bool else int):
            word = value.strip().capitalize() if isinstance(value, str) else ""
            fix = f"Write {word}, without quotes." if word in ("True", "False") else "Pass True or False."
            return ValueProblem(self.wrong_type, fix, says="has the wrong type")
        return None if value in (0, 1) else ValueProblem(ValueError, "Pass True or False.", says="is neither 0 nor 1")

    def normalise(self, value: Any) -> Any:
        return bool(value)


@dataclass(frozen=True)
class Number(OptionKind):
    """`int` or `float`, at least 0 or above 0; for parameters that `tf.estimator.RunConfig` checks itself.

    Attributes:
      above_zero: whether 0 is illegal.
      whole: whether only whole numbers are legal; 100.0 is one, infinity is not.
    """

    above_zero: bool = False
    whole: bool = False

    @property
    def expected(self) -> str:
        number = "a whole number" if self.whole else "a number"
        return f"{number} above 0" if self.above_zero else f"{number} of at least 0"

    def find_problem(self, value: Any) -> ValueProblem | None:
        if not is_number(value):
            return ValueProblem(
                TypeError, quoted_number_fix(value, float) or "Pass a number.", says="has the wrong type"
            )
        if not (value > 0 if self.above_zero else value >= 0):
            return ValueProblem(ValueError, f"Use {int(self.above_zero)} or more.")
        if self.whole and value > _INT64_LIMITS[1]:
            return ValueProblem(ValueError, _FITS_64_BITS)
        if self.whole and value != int(value):
            return ValueProblem(ValueError, f"Use {int(value)} or {int(value) + 1}.", says="is not a whole number")
        return None

    def normalise(self, value: Any) -> Any:
        return int(value) if self.whole else value


@dataclass(frozen=True)
class Seed(OptionKind):
    """An integer; a wrong type is a ValueError, as in `tf.estimator.RunConfig`."""

    expected = "an integer"

    def find_problem(self, value: Any) -> ValueProblem | None:
        if isinstance(value, bool) or not isinstance(value, int):
            return ValueProblem(ValueError, _suggest_int(value), says="has the wrong type")
        return None


@dataclass(frozen=True)
class Directory(OptionKind):
    """A path: non-empty `str`, `bytes` or path object."""

    expected = "a non-empty path"

    def find_problem(self, value: Any) -> ValueProblem | None:
        if not isinstance(value, (str, bytes, os.PathLike)):
            return ValueProblem(TypeError, "Pass a path.", says="has the wrong type")
        if "\0" in os.fsdecode(value):
            return _NULL_BYTE
        return None if os.fspath(value) else ValueProblem(ValueError, "Give a directory, or leave the option out.")

    def normalise(self, value: Any) -> Any:
        return os.fsdecode(value)


@dataclass(frozen=True)
class HelperObject(OptionKind):
    """One of the helper config objects, identified by the owner name under which its class is declared."""

    owner: str = ""

    @property
    def expected(self) -> str:
        return f"{'an' if self.owner.startswith('E') else 'a'} {self.owner}"

    def find_problem(self, value: Any) -> ValueProblem | None:
        if getattr(type(value), "_declared_as", None) != self.owner:
            return ValueProblem(ValueError, f"Build it with {self.owner}(...).", says="has the wrong type")
        return None


@dataclass(frozen=True)
class TensorFlowObject(OptionKind):
    """An instance of a TensorFlow class; TensorFlow is imported when a value is checked.

    Attributes:
      classes: class names below `tensorflow`; an instance of any of them is legal.
    """

    classes: tuple[str, ...] = ()

    @property
    def expected(self) -> str:
        return "a tf." + " or tf.".join(self.classes)

    def find_problem(self, value: Any) -> ValueProblem | None:
        import tensorflow as tf

        for path in self.classes:
            found: Any = tf
            for part in path.split("."):
                found = getattr(found, part)
            if isinstance(value, found):
                return None
        return ValueProblem(ValueError, f"Pass {self.expected}.", says="has the wrong type")
