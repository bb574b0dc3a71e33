"""Changing a module at the moment it has been loaded, whoever loads it.

A script may set variables before it imports TensorFlow or Horovod, so a rank must not import them first.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any, Callable

__all__ = ["after_import"]


def after_import(name: str, change: Callable[[types.ModuleType], None]) -> None:
    """Calls `change` with a module once it has been loaded; to be called before it is."""
    sys.meta_path.insert(0, _Finder(name, change))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the one module as Python does, and wraps what loads it."""

    def __init__(self, name: str, change: Callable[[types.ModuleType], None]):
        self._name = name
        self._change = change

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                load(module)
                self._change(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
