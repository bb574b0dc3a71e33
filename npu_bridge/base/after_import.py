"""Changes modules at the moment they are loaded, through an import hook.

A script can set variables before it imports TensorFlow or Horovod, so this package must not import them first.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from contextlib import AbstractContextManager
from typing import Any, Callable


def call_after_import(
    module_name: str,
    callback: Callable[[types.ModuleType], None],
    while_loading: Callable[[], AbstractContextManager] = contextlib.nullcontext,
    if_missing: Callable[[], None] | None = None,
) -> None:
    """Calls `callback` with a module as soon as the module is loaded. The module must not be loaded yet.

    Args:
      module_name: the module's name.
      callback: is called with the module; if it raises an error, the import fails.
      while_loading: returns the context manager in which the module is loaded; an error on entry makes the import fail.
      if_missing: is called at each import that does not find the module; an error makes the import fail.
    """
    sys.meta_path.insert(0, _Finder(module_name, callback, while_loading, if_missing))


def call_when_loaded(module_name: str, callback: Callable[[types.ModuleType], None]) -> None:
    """Calls `callback` with a module: now if the module is loaded, else as soon as it is."""
    if module_name in sys.modules:
        callback(sys.modules[module_name])
    else:
        call_after_import(module_name, callback)


def wrap_function(owner: Any, name: str, function: Callable) -> None:
    """Replaces the function `name` of a class or a module by `function(original, *arguments)`."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def replacement(*arguments, **keywords):
        return function(original, *arguments, **keywords)

    setattr(owner, name, replacement)


def importing_module_name() -> str:
    """Returns the name of the module with the running import statement, for callbacks of `call_after_import`."""
    frame = sys._getframe(1)
    passing = (__name__, frame.f_globals.get("__name__"))
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name not in passing and name.split(".")[0] not in ("importlib", "_frozen_importlib"):
            return name
        frame = frame.f_back
    return ""


class _Finder(importlib.abc.MetaPathFinder):
    """A finder that finds one module as Python would, and wraps the module's loader."""

    def __init__(self, name, change, while_loading, if_missing):
        self._name = name
        self._change = change
        self._while_loading = while_loading
        self._if_missing = if_missing
        self._is_asking_others = False

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self._name or self._is_asking_others:
            return None
        self._is_asking_others = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_asking_others = False
        if spec is None and self._if_missing is not None:
            self._if_missing()
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                with self._while_loading():
                    # A new list: another thread that goes through the old one would miss the finder after this one.
                    sys.meta_path = [finder for finder in sys.meta_path if finder is not self]
                    load(module)
                self._change(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
