"""Makes stages from a configuration, which gives the class and the arguments of each stage as plain data."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from npu_bridge.base.errors import did_you_mean, message, option_error, shown, signature_of_class
from npu_bridge.gradients.stage import Stage

_CLASS_KEY = "stage"  # the key that names the class


def make_stages(config: Any, public_classes: Iterable[type[Stage]]) -> list:
    """Makes the stages of a configuration, in the order of its list.

    Args:
      config: a mapping whose only key, "stages", holds a list of mappings. Each mapping has the name of a class under
        "stage", and arguments of its constructor.
      public_classes: the classes of this package that a configuration can name; user-defined classes need no entry.
    Raises:
      TypeError, ValueError: `config` has another structure, or a stage or an argument is unknown, missing or illegal.
        The attribute `option` of the error is the wrong key, if known.
    """
    tables = config.get("stages") if isinstance(config, Mapping) and len(config) == 1 else None
    if not isinstance(tables, (list, tuple)):
        expected, fix = "{'stages': [...]}, and nothing else", "Put the list under 'stages'; remove other keys."
        raise ValueError(message("from_config", "config is not a list of stages", expected, shown(config), fix))
    known = {stage_class.__name__: stage_class for stage_class in [*_user_defined_subclasses(Stage), *public_classes]}
    return [_make_stage(table, known) for table in tables]


def _make_stage(table, stage_classes):
    if not isinstance(table, Mapping) or _CLASS_KEY not in table:
        expected, fix = f"a table with {_CLASS_KEY!r}", f"Add the name of a class, such as {_CLASS_KEY} = 'Accumulate'."
        raise ValueError(message("stages", "the table names no stage", expected, shown(table), fix))
    arguments = dict(table)
    name = arguments.pop(_CLASS_KEY)
    if not isinstance(name, str) or name not in stage_classes:
        fix = did_you_mean(name, stage_classes, "Import the module that defines your own class first.")
        problem, expected = f"unknown stage {shown(name)}", f"one of {', '.join(sorted(stage_classes))}"
        raise option_error(ValueError, "stages", _CLASS_KEY, problem, expected, shown(name), fix)
    _check_arguments(stage_classes[name], arguments)
    try:
        return stage_classes[name](**arguments)
    except (TypeError, ValueError) as error:
        # The error has no attribute `option`, but its text contains the name of the argument.
        named = (key for key in arguments if re.search(rf"\b{re.escape(key)}\b", str(error)))
        error.option = next(named, _CLASS_KEY)  # type: ignore[attr-defined]
        raise


def _check_arguments(stage_class, arguments):
    signature = signature_of_class(stage_class)
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    names = list(signature.parameters)
    takes = f"one of {', '.join(names)}" if names else "no argument"
    for key in arguments if inspect.Parameter.VAR_KEYWORD not in kinds else ():
        if key not in names:
            problem, fix = f"unknown argument {key!r}", did_you_mean(key, names, "Remove it.")
            raise option_error(ValueError, stage_class.__name__, key, problem, takes, repr(key), fix)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        problem, got = str(error), ", ".join(arguments) or "none"
        raise option_error(
            ValueError, stage_class.__name__, _CLASS_KEY, problem, takes, got, "Add the argument."
        ) from None


def _user_defined_subclasses(base: type) -> Iterator[type]:
    """Yields the user-defined subclasses of `base`."""
    for stage_class in base.__subclasses__():
        yield from _user_defined_subclasses(stage_class)
        if stage_class.__module__.partition(".")[0] != "npu_bridge":
            yield stage_class
