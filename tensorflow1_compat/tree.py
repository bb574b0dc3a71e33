"""Decides which files belong to the user, and makes Python load these files with `source.UserLoader`.

Python calls each path hook once per folder to get a finder. The hook of this module returns a finder only for folders
of the user's tree, so other imports never run code of this package.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Iterable
from typing import Any

from npu_bridge.base.machine import library_folders, project_package_folders

__all__ = ["SourceTree"]

_OWN_FOLDERS = tuple(map(os.path.realpath, project_package_folders()))
_INSTALLED_FOLDERS = {"site-packages", "dist-packages"}


class SourceTree:
    """The folders that hold the user's modules: roots with all their sub-folders, and additions to `sys.path`.

    Installed packages inside these folders, such as a virtual environment of the project, do not belong to the user.

    Args:
      roots: the script's folder and the folders of `--tree`.
      known_paths: `sys.path` before the script runs. These folders do not belong to the user, unless below a root.
    """

    def __init__(self, roots: Iterable[str], known_paths: Iterable[str] | None = None):
        self.roots = [os.path.realpath(root) for root in roots]
        known = sys.path if known_paths is None else known_paths
        self.known_paths = [os.path.realpath(path or os.curdir) for path in known]
        self._libraries = tuple(map(os.path.realpath, library_folders()))

    def contains_file(self, path: str) -> bool:
        """Returns whether a file or folder belongs to the user."""
        path = os.path.realpath(path)
        if any(_is_in_folder(path, root) for root in (*_OWN_FOLDERS, *self._libraries)):
            return False
        return any(
            _is_in_folder(path, root) and not _INSTALLED_FOLDERS.intersection(path[len(root) :].split(os.sep))
            for root in self.roots
        )

    def contains_module(self, name: str) -> bool:
        """Returns whether Python finds a top-level module among the user's files."""
        module = sys.modules.get(name)
        if module is not None:
            spec = getattr(module, "__spec__", None)
        else:
            try:
                spec = importlib.machinery.PathFinder.find_spec(name)
            except (ImportError, ValueError):
                return False
        if spec is None:
            return False
        places = [spec.origin] if spec.origin and spec.has_location else list(spec.submodule_search_locations or ())
        return any(self.contains_file(place) for place in places)

    def install_import_hook(
        self,
        loader: type[importlib.machinery.SourceFileLoader],
        extension_loader: type[importlib.machinery.ExtensionFileLoader],
    ) -> None:
        """Makes Python load source modules of the tree with `loader` and compiled modules with `extension_loader`."""

        def hook(path: str) -> Any:
            if not os.path.isdir(path) or not (self.contains_file(path) or self._accept_added_folder(path)):
                raise ImportError(f"{path} is not in the user's source tree")
            return importlib.machinery.FileFinder(
                path,
                (extension_loader, importlib.machinery.EXTENSION_SUFFIXES),
                (loader, importlib.machinery.SOURCE_SUFFIXES),
                (importlib.machinery.SourcelessFileLoader, importlib.machinery.BYTECODE_SUFFIXES),
            )

        sys.path_hooks.insert(0, hook)
        # `python -m` had the current folder on `sys.path`. If the script adds it again, it belongs to the user.
        current = os.path.realpath(os.curdir)
        for path in list(sys.path_importer_cache):
            if self.contains_file(path) or os.path.realpath(path) == current:
                del sys.path_importer_cache[path]

    def _accept_added_folder(self, path: str) -> bool:
        """Adds a folder that the script has added to `sys.path` to the tree; returns whether it was added."""
        real = os.path.realpath(path)
        if path not in sys.path or any(_is_in_folder(real, known) for known in self.known_paths):
            return False
        if _INSTALLED_FOLDERS.intersection(real.split(os.sep)) or any(_is_in_folder(real, p) for p in self._libraries):
            return False
        if any(name.endswith((".dist-info", ".egg-info")) for name in os.listdir(real)):
            return False
        self.roots.append(real)
        return self.contains_file(real)


def _is_in_folder(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)
