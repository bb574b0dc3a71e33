"""Modules of one package under the name of another; each exists once."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from typing import Any


def let_find_same_modules(alias: str, package: str) -> None:
    """Lets imports of `alias.x` find the module `package.x`; again is as good as once."""
    if not any(isinstance(finder, _Finder) and finder.alias == alias for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(alias, package))


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what is not there in files of its own."""

    def __init__(self, alias: str, package: str):
        self.alias, self._package = alias, package

    def find_spec(self, fullname: str, path: Any = None, target: Any = None):
        """A spec for an existing module of the package, None for everything else."""
        del path, target
        name = fullname.removeprefix(f"{self.alias}.")
        if name == fullname or name.startswith("_"):
            return None
        if importlib.util.find_spec(f"{self._package}.{name}") is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, origin=f"{self._package}.{name}")

    def create_module(self, spec):
        """The module itself."""
        module = importlib.import_module(spec.origin)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module):
        """Nothing to run; the module gets its own spec back, which importing it by this name has replaced."""
        own = module.__spec__.loader_state
        if own is not None:
            module.__spec__ = own
