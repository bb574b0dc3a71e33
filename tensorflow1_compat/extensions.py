"""Gives numpy's old names to compiled modules of the user's tree, such as Cython modules."""

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

    Imports in compiled modules cannot be replaced. So this loader adds the old names to numpy itself while a module is
    loaded; afterwards it makes the module refer to the proxy of numpy that source files get.
    """

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        with self._add_old_names_to_numpy():
            return super().create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        with self._add_old_names_to_numpy() as numpy:
            super().exec_module(module)
        for name, value in list(vars(module).items()):
            if value is numpy is not None:
                vars(module)[name] = proxies.proxy("numpy")

    @contextlib.contextmanager
    def _add_old_names_to_numpy(self) -> Iterator[types.ModuleType | None]:
        """Adds removed names to numpy inside the block; yields numpy, or None if the module does not use numpy."""
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
