"""Small checks of arguments, most of which scripts import from `util`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from npu_bridge import collective
from npu_bridge.base.errors import shown
from npu_bridge.options import OPTIONS
from npu_bridge.options.kinds import Boolean, Integer
from npu_bridge.options.rules import usable_directory
from npu_bridge.options.table import IN_OBJECT

_PROFILING_OPTIONS = ("training_trace", "task_time", "op_trace")


def check_not_none(value: Any, name: str) -> None:
    """Checks that a value is given.

    Raises:
      ValueError: it is None.
    """
    if value is None:
        raise ValueError(f"{name} is missing. Expected a value; got None. Pass one.")


def check_positive_integer(value: Any, name: str) -> None:
    """Checks for an integer of at least 1; a bool counts as an integer.

    Raises:
      TypeError: not an int.
      ValueError: below 1.
    """
    _check(Integer(1), value, name)


def check_nonnegative_integer(value: Any, name: str) -> None:
    """Checks for an integer of at least 0; a bool counts as an integer.

    Raises:
      TypeError: not an int.
      ValueError: below 0.
    """
    _check(Integer(0), value, name)


def check_bool_type(value: Any, name: str) -> None:
    """Checks for True or False.

    Raises:
      TypeError: neither.
    """
    _check(Boolean(only_bool=True), value, name)


def convert_bool_to_int(value: Any) -> int:
    """1 for True, 0 for False, -1 for anything else."""
    return int(value) if isinstance(value, bool) else -1


def format_string(value: str | None, name: str) -> str:
    """The text itself, empty for None.

    Raises:
      TypeError: neither text nor None.
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TypeError(f"{name} has the wrong type. Expected a string or None; got {shown(value)}. Pass a string.")
    return value


def check_profiling_options(profiling_options: Iterable[str] = ()) -> str:
    """The profiling options joined by `:`.

    Raises:
      ValueError: none is given, or one is unknown.
    """
    options = list(profiling_options)
    if not options or not set(options) <= set(_PROFILING_OPTIONS):
        raise ValueError(
            f"profiling_options is empty or has an unknown option. Expected some of {', '.join(_PROFILING_OPTIONS)}; "
            f"got {options!r}. Name at least one of these."
        )
    return ":".join(options)


def check_path(path: str) -> str:
    """The real path of an existing directory that can be read and written.

    Raises:
      ValueError: there is no such directory, or permission is missing.
    """
    return usable_directory(path)


def check_aoe_mode(aoe_mode: str) -> None:
    """Checks for a tuning mode.

    Raises:
      ValueError: not "1", "2" or "4".
    """
    try:
        check_not_none(aoe_mode, "aoe_mode")
        OPTIONS["aoe_mode"].check(aoe_mode, IN_OBJECT)
    except TypeError as error:
        raise ValueError(str(error)) from error


def check_root_rank(owner: str, root_rank: Any) -> None:
    """ValueError unless it is a rank; with a single rank it has no effect."""
    size = collective.current().size
    if size > 1 and root_rank not in range(size):
        raise ValueError(
            f"{owner}: root_rank is not a rank. Expected an integer from 0 to {size - 1}; got {root_rank!r}. Use 0."
        )


def _check(kind: Integer | Boolean, value: Any, name: str) -> None:
    problem = kind.problem(value)
    if problem is not None:
        raise problem.error(f"{name} {problem.says}. Expected {kind.expected}; got {shown(value)}. {problem.fix}")
