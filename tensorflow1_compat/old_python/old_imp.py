"""Replaces functions of the module `imp`, which Python 3.12 removed, by calls of `importlib`."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import io
import os
import sys
import tokenize
import types
from importlib import reload
from importlib.util import MAGIC_NUMBER, cache_from_source, source_from_cache
from typing import Any

__all__ = [
    "C_BUILTIN", "C_EXTENSION", "PKG_DIRECTORY", "PY_COMPILED", "PY_FROZEN", "PY_SOURCE", "acquire_lock",
    "cache_from_source", "find_module", "get_magic", "get_suffixes", "get_tag", "init_builtin", "is_builtin",
    "load_compiled", "load_dynamic", "load_module", "load_package", "load_source", "lock_held", "new_module",
    "release_lock", "reload",
    "source_from_cache",
]  # fmt: skip

PY_SOURCE, PY_COMPILED, C_EXTENSION, PKG_DIRECTORY, C_BUILTIN, PY_FROZEN = 1, 2, 3, 5, 6, 7


def new_module(name: str) -> types.ModuleType:
    """Returns an empty module that is not in `sys.modules`."""
    return types.ModuleType(name)


def get_magic() -> bytes:
    """Returns the magic number at the start of `.pyc` files."""
    return MAGIC_NUMBER


def get_tag() -> str | None:
    """Returns the tag in the names of this Python's `.pyc` files, such as "cpython-311"."""
    return sys.implementation.cache_tag


def get_suffixes() -> list[tuple[str, str, int]]:
    """Returns (suffix, mode, kind) for each kind of module file."""
    machinery = importlib.machinery
    kinds = (
        (machinery.EXTENSION_SUFFIXES, "rb", C_EXTENSION),
        (machinery.SOURCE_SUFFIXES, "r", PY_SOURCE),
        (machinery.BYTECODE_SUFFIXES, "rb", PY_COMPILED),
    )
    return [(suffix, mode, kind) for suffixes, mode, kind in kinds for suffix in suffixes]


def acquire_lock() -> None:
    """Does nothing: Python now has a separate lock for each module."""


def release_lock() -> None:
    """Does nothing: Python now has a separate lock for each module."""


def lock_held() -> bool:
    """Returns False: Python now has a separate lock for each module."""
    return False


def is_builtin(name: str) -> int:
    """Returns 1 for the name of a built-in module, else 0."""
    return int(name in sys.builtin_module_names)


def init_builtin(name: str) -> types.ModuleType | None:
    """Returns a built-in module by its name; None for other names."""
    return importlib.import_module(name) if is_builtin(name) else None


def find_module(name: str, path: list[str] | None = None) -> tuple[Any, str | None, tuple[str, str, int]]:
    """Finds a module; returns (open file or None, path, (suffix, mode, kind)).

    Args:
      name: name of the module, without dots.
      path: folders to search; None for built-in modules and `sys.path`.
    Raises:
      ImportError: no module has the name.
    """
    if path is None and is_builtin(name):
        return None, None, ("", "", C_BUILTIN)
    for folder in sys.path if path is None else path:
        place = os.path.join(folder, name)
        if any(os.path.isfile(os.path.join(place, f"__init__{end}")) for end in (".py", ".pyc")):
            return None, place, ("", "", PKG_DIRECTORY)
        for suffix, mode, kind in get_suffixes():
            if os.path.isfile(place + suffix):
                return _open_source(place + suffix, mode), place + suffix, (suffix, mode, kind)
    raise ImportError(f"No module named {name!r}", name=name)


def _open_source(path: str, mode: str) -> Any:
    file = io.open_code(path)  # noqa: SIM115 - the caller closes it
    if mode == "rb":
        return file
    encoding, _ = tokenize.detect_encoding(file.readline)
    file.seek(0)
    return io.TextIOWrapper(file, encoding, line_buffering=True)


def load_source(name: str, pathname: str, file: Any = None) -> types.ModuleType:
    """Loads a module from a source file, into an existing module of this name in `sys.modules` if there is one."""
    return _load_module(name, pathname, _source_loader(name, pathname))


def load_compiled(name: str, pathname: str, file: Any = None) -> types.ModuleType:
    """Loads a module from a `.pyc` file; a module of this name that is already in `sys.modules` is filled again."""
    return _load_module(name, pathname, importlib.machinery.SourcelessFileLoader(name, pathname))


def load_dynamic(name: str, path: str, file: Any = None) -> types.ModuleType:
    """Loads a module from a shared library; a module of this name that is already in `sys.modules` is filled again."""
    return _load_module(name, path, importlib.machinery.ExtensionFileLoader(name, path))


def load_package(name: str, path: str) -> types.ModuleType:
    """Loads a package from a folder, into an existing module of this name in `sys.modules` if there is one."""
    file = os.path.join(path, "__init__.py") if os.path.isdir(path) else path
    return _load_module(name, file, _source_loader(name, file), [path])


def load_module(name: str, file: Any, filename: str, details: tuple[str, str, int]) -> types.ModuleType:
    """Loads a module from the results of `find_module`.

    Raises:
      ImportError: modules of this kind cannot be loaded.
    """
    kind = details[2]
    if file is not None:
        file.close()
    if kind == C_BUILTIN:
        return importlib.import_module(name)
    loaders = {
        PY_SOURCE: load_source, PY_COMPILED: load_compiled, C_EXTENSION: load_dynamic, PKG_DIRECTORY: load_package,
    }  # fmt: skip
    if kind not in loaders:
        raise ImportError(f"Don't know how to import {name} (type code {kind})", name=name)
    return loaders[kind](name, filename)


def _source_loader(name: str, path: str) -> Any:
    """Returns the loader that an import of the file would use: `UserLoader` for the user's files."""
    from tensorflow1_compat.proxies import is_user_file
    from tensorflow1_compat.source import UserLoader

    return (UserLoader if is_user_file(path) else importlib.machinery.SourceFileLoader)(name, path)


def _load_module(name: str, path: str, loader: Any, search_paths: list[str] | None = None) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path, loader=loader, submodule_search_locations=search_paths)
    module = sys.modules.get(name)
    is_new = module is None
    if is_new:
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if is_new:
            sys.modules.pop(name, None)
        raise
    return sys.modules.get(name, module)
