"""Lets compiled modules of the user's tree, such as those of Cython, find numpy's old names, too."""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import pkgutil
import types
from collections.abc import Iterator

from tensorflow1_compat import proxies
from tensorflow1_compat.old_python import removed_names

__all__ = ["UserExtensionLoader"]

_OLD_NAMES = {
    name.partition(".")[2]: place
    for name, place in removed_names.GONE_NAMES.items()
    if name.startswith("numpy.") and name.count(".") == 1
}


class UserExtensionLoader(importlib.machinery.ExtensionFileLoader):
    """A loader of compiled modules of the user's tree.

    Their imports cannot be replaced. So numpy itself has its old names while a module is loaded; afterwards the
    module's references to numpy become the proxy that source files get.
    """

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        with self._old_names():
            return super().create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        with self._old_names() as numpy:
            super().exec_module(module)
        for name, value in list(vars(module).items()):
            if value is numpy is not None:
                vars(module)[name] = proxies.proxy("numpy")

    @contextlib.contextmanager
    def _old_names(self) -> Iterator[types.ModuleType | None]:
        """Gives numpy its removed names inside the block; yields numpy, or None for a module without numpy."""
        if b"numpy" not in self.get_data(self.path) or proxies.is_plain("numpy"):
            yield None
            return
        numpy = importlib.import_module("numpy")
        given = {name: place for name, place in _OLD_NAMES.items() if name not in vars(numpy)}
        for name, place in given.items():
            setattr(numpy, name, pkgutil.resolve_name(place))
        try:
            yield numpy
        finally:
            for name in given:
                delattr(numpy, name)
