"""Looks up dotted names as the imports of a TensorFlow 1 script do, and the calls that their signatures allow."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

from npu_bridge.base import environment
from npu_bridge.base.lazy import import_module_or_object
from tensorflow1_compat import journal, proxies
from tensorflow1_compat.reading import ScriptCall
from tensorflow1_compat.tables import OF_1, NameTables
from tensorflow1_compat.tables_of_2 import OF_2

__all__ = ["Found", "find_call_problem", "look_up"]

_PLAIN = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}


class Found(NamedTuple):
    """The result of a look-up.

    Attributes:
      value: the object; None for a name that is missing, or that belongs to a class or another object.
      missing: the shortest prefix of the name that does not exist, or None.
      neighbours: all names of the module that lacks the name.
    """

    value: Any = None
    missing: str | None = None
    neighbours: tuple[str, ...] = ()


@functools.cache
def look_up(name: str, era: int = 1) -> Found:
    """Looks up a name such as `tensorflow.nn.dropout`; loads TensorFlow and the modules of the name.

    Args:
      name: the dotted name.
      era: 1 or 2, the version of TensorFlow for which the script is written.
    """
    with _quiet_imports(OF_1 if era == 1 else OF_2):
        first, *rest = proxies.canonical_name(name).split(".")
        try:
            at = proxies.proxy(first)
        except Exception:  # a package can raise anything while it is imported
            return Found()
        for length, part in enumerate(rest, 2):
            if not inspect.ismodule(at) or part.startswith("__"):
                return Found()  # attributes of other objects can appear during a run
            try:
                at = _value_in_module(at, part, f"{first}.{'.'.join(rest[: length - 1])}")
            except (AttributeError, ImportError):
                return Found(None, ".".join([first, *rest[: length - 1]]), tuple(dir(at)))
            except Exception:
                return Found()
    return Found(at)


def _value_in_module(module: Any, name: str, full_name: str) -> Any:
    if isinstance(module, proxies.ModuleProxy):
        return module.value_of_import(name)
    return getattr(module, name) if hasattr(module, name) else proxies.proxy(full_name)


@contextlib.contextmanager
def _quiet_imports(tables: NameTables) -> Iterator[None]:
    """Imports modules with the names of tables in a block, without lines, warnings or entries in the report."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            environment.set_variables_temporarily(lambda: _QUIET),
            warnings.catch_warnings(),
            journal.nothing_recorded(),
            proxies.proxies_without_tree(tables),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def find_call_problem(name: str, call: ScriptCall) -> str | None:
    """Returns why a call cannot work, in a few words; None if the call can work, or its signature is unknown.

    Args:
      name: a dotted name, such as `tensorflow.nn.dropout`.
      call: the arguments of the call.
    """
    function = look_up(name).value
    maker = function
    if inspect.isclass(function):
        maker = function.__new__ if function.__init__ is object.__init__ else function.__init__
    if not inspect.isfunction(maker):
        return None
    every = list(inspect.signature(maker).parameters.values())[maker is not function :]
    kinds = {parameter.kind for parameter in every}
    positional = [parameter.name for parameter in every if parameter.kind in _PLAIN]
    named = [parameter.name for parameter in every if parameter.kind in _NAMED]
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        for keyword in call.keywords:
            if keyword not in named:
                return f"has no argument {keyword!r}; it has {_join_names(named)}"
    if call.positional is None:
        return None
    if call.positional > len(positional) and inspect.Parameter.VAR_POSITIONAL not in kinds:
        return f"takes {len(positional)} arguments without a name, not {call.positional}"
    if call.is_open or import_module_or_object("tf_slim:has_arg_scope")(function):  # a scope can provide the others
        return None
    given = {*positional[: call.positional], *call.keywords}
    required = [each.name for each in every if each.default is each.empty and each.kind in (*_PLAIN, *_NAMED)]
    missing = [argument for argument in required if argument not in given]
    return f"needs the argument {missing[0]!r}" if missing else None


def _join_names(names: list[str]) -> str:
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "") if names else "none"
