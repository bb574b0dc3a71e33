"""Small checks and conversions scripts call by these names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from npu_bridge import precision
from npu_bridge.options import OPTIONS, environment
from npu_bridge.options.kinds import Boolean, Integer, usable_directory
from npu_bridge.options.table import IN_OBJECT, shown

__all__ = [
    "check_aoe_mode",
    "check_bool_type",
    "check_nonnegative_integer",
    "check_not_none",
    "check_path",
    "check_positive_integer",
    "check_profiling_options",
    "convert_bool_to_int",
    "format_string",
    "get_ranksize",
    "keep_tensors_dtypes",
]

_PROFILING_OPTIONS = ("training_trace", "task_time", "op_trace")


def get_ranksize() -> str:
    """The declared number of ranks as text.

    Raises:
      ValueError: RANK_SIZE and CM_WORKER_SIZE are both set.
    """
    return environment.rank_size_text()


def keep_tensors_dtypes(graph: tf.Graph, input_tensors: Iterable[str]) -> None:
    """Lets the operators behind some tensors keep their dtype, whatever the precision mode is.

    Call it before the first run of a session that computes them.

    Args:
      graph: the graph.
      input_tensors: list or tuple of tensor names, such as "dense/MatMul:0".
    Raises:
      ValueError: `graph` is not a Graph, or `input_tensors` is neither list nor tuple.
      KeyError: the graph has no tensor of a name.
    """
    if not isinstance(graph, tf.Graph):
        raise ValueError(
            f"keep_tensors_dtypes: graph is not a graph. Expected a tf.Graph; got {shown(graph)}. Pass "
            f"tf.get_default_graph()."
        )
    if not isinstance(input_tensors, (list, tuple)):
        raise ValueError(
            f"keep_tensors_dtypes: input_tensors is no list. Expected a list or tuple of tensor names; got "
            f"{shown(input_tensors)}. Pass [name]."
        )
    for name in input_tensors:
        precision.mark(graph.get_tensor_by_name(name).op)


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
            f"profiling_options is not usable. Expected some of {', '.join(_PROFILING_OPTIONS)}; "
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


def _check(kind: Integer | Boolean, value: Any, name: str) -> None:
    problem = kind.problem(value)
    if problem is not None:
        raise problem.error(f"{name} {problem.says}. Expected {kind.expected}; got {shown(value)}. {problem.mend}")
