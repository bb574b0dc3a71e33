"""Defines an object whose attributes are options; each option is checked when a script sets it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from npu_bridge.base.errors import did_you_mean, message, say_once


class Leaf(NamedTuple):
    """The declaration of one option: its default and its allowed values; `allowed=None` allows any value."""

    default: Any = None
    allowed: tuple | None = None


class OptionTree:
    """An object whose attributes are options or nested trees of options; a nested tree cannot be replaced.

    Args:
      path: the expression for this object in scripts, for messages.
      declared: for each option name a `Leaf`; for each nested tree the mapping of its own options.
      deprecated: for each deprecated option, advice for the warning about its use.
    """

    def __init__(self, path: str, declared: Mapping[str, Any], deprecated: Mapping[str, str] | None = None):
        keep = self.__dict__
        keep["_path"], keep["_declared"], keep["_deprecated"] = path, declared, deprecated or {}
        keep["_values"], keep["_frozen"] = {}, False
        for name, entry in declared.items():
            keep["_values"][name] = entry.default if isinstance(entry, Leaf) else OptionTree(f"{path}.{name}", entry)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in self._values:
            raise self._unknown_option_error(AttributeError, name)
        return self._values[name]

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an option.

        Raises:
          ValueError: no option has this name, or the value is not allowed.
          TypeError: the value has the wrong type.
        """
        entry = self._declared.get(name)
        if entry is None:
            raise self._unknown_option_error(ValueError, name)
        self._check_value(name, entry, value)
        if name in self._deprecated:
            say_once(logging.WARNING, f"{self._path}.{name} is deprecated and has no effect. {self._deprecated[name]}")
        if self._frozen and value != self._values[name]:
            problem = "the option was set too late to have an effect"
            text = message(
                f"{self._path}.{name}",
                problem,
                "a setting before npu_device.open()",
                "a later setting",
                f"Set {name} earlier.",
            )
            say_once(logging.WARNING, text)
        self._values[name] = value

    def __dir__(self):
        return sorted(self._values)

    def __repr__(self) -> str:
        return f"{self._path}({', '.join(f'{name}={value!r}' for name, value in self._values.items())})"

    def changed_options(self) -> dict[str, Any]:
        """Returns the options without their default, also in nested trees, by names such as "dump_config.dump_path"."""
        found = {}
        for name, value in self._values.items():
            if isinstance(value, OptionTree):
                found.update({f"{name}.{inner}": each for inner, each in value.changed_options().items()})
            elif value != self._declared[name].default:
                found[name] = value
        return found

    def freeze(self) -> None:
        """Makes every later change of an option log a warning: the value is kept, but too late to have an effect."""
        self.__dict__["_frozen"] = True
        for value in self._values.values():
            if isinstance(value, OptionTree):
                value.freeze()

    def _check_value(self, name: str, entry: Any, value: Any) -> None:
        where = f"{self._path}.{name}"
        if not isinstance(entry, Leaf):
            fix = f"Write {where}.{next(iter(entry))} = ..., for example."
            raise TypeError(
                message(where, "this group of options cannot be replaced", "a value for each option", repr(value), fix)
            )
        if entry.allowed is None or (value is None and entry.default is None):
            return
        if any(value == each and _have_same_type(value, each) for each in entry.allowed):
            return
        expected = ", ".join(repr(each) for each in entry.allowed)
        if entry.default is not None and not _have_same_type(value, entry.default):
            got = f"{value!r} ({type(value).__name__})"
            raise TypeError(message(where, "the value has the wrong type", expected, got, "Use an expected value."))
        words = [each for each in entry.allowed if isinstance(each, str)]
        fix = did_you_mean(value, words, "Use an expected value.")
        raise ValueError(message(where, "the value is not allowed", expected, repr(value), fix))

    def _unknown_option_error(self, kind: type[Exception], name: str) -> Exception:
        fix, known = did_you_mean(name, self._values, "Remove it."), ", ".join(sorted(self._values))
        return kind(message(self._path, f"unknown option {name!r}", f"one of {known}", repr(name), fix))


def _have_same_type(value: Any, other: Any) -> bool:
    return isinstance(value, type(other)) and isinstance(value, bool) == isinstance(other, bool)
