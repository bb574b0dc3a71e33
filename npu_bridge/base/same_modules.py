"""Lets modules be imported under a second name, through an import hook."""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any


def enable_second_names(alias: str, package: str) -> None:
    """Makes the module `package.x` importable as `alias.x`; calling it again has no effect."""
    make_importable(alias, functools.partial(_find_submodule, package))


def make_importable(alias: str, find_module: Callable[[str], str | types.ModuleType | None]) -> None:
    """Makes `alias.x` importable for the names `x` that `find_module` knows; calling it again has no effect.

    Args:
      find_module: gets `x` and returns the full name of an existing module, or a new module. If it returns None, Python
        does the import.
    """
    if not any(isinstance(finder, _Finder) and finder.alias == alias for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(alias, find_module))


def _find_submodule(package: str, name: str) -> str | None:
    """Returns the full name of a package's module; None if the package has no such module."""
    is_there = not name.startswith("_") and importlib.util.find_spec(f"{package}.{name}") is not None
    return f"{package}.{name}" if is_there else None


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A finder for modules without files of their own."""

    def __init__(self, alias: str, find: Callable[[str], str | types.ModuleType | None]):
        self.alias, self._find = alias, find

    def find_spec(self, fullname: str, path: Any = None, target: Any = None):
        """Returns a spec for a module that `find` knows; None for every other module."""
        del path, target
        name = fullname.removeprefix(f"{self.alias}.")
        found = None if name == fullname else self._find(name)
        if found is None:
            return None
        is_made = isinstance(found, types.ModuleType)
        spec = importlib.machinery.ModuleSpec(fullname, self, origin=None if is_made else found, is_package=is_made)
        spec.loader_state = found if is_made else None
        return spec

    def create_module(self, spec):
        """Returns the existing or new module."""
        if spec.origin is None:
            return spec.loader_state
        module = importlib.import_module(spec.origin)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module):
        """Executes no code; restores the module's own spec, which the import under the second name has replaced."""
        own = module.__spec__.loader_state
        if isinstance(own, importlib.machinery.ModuleSpec):
            module.__spec__ = own
