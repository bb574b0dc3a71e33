"""Replaces the parts of the module `imp` that scripts use, by `importlib`: Python 3.12 removed it."""

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
    """Returns the first bytes of files of compiled code."""
    return MAGIC_NUMBER


def get_tag() -> str | None:
    """Returns this Python's tag in the names of files of compiled code."""
    return sys.implementation.cache_tag


def get_suffixes() -> list[tuple[str, str, int]]:
    """Returns endings of file names, with the mode to open such files and their kind."""
    machinery = importlib.machinery
    kinds = (
        (machinery.EXTENSION_SUFFIXES, "rb", C_EXTENSION),
        (machinery.SOURCE_SUFFIXES, "r", PY_SOURCE),
        (machinery.BYTECODE_SUFFIXES, "rb", PY_COMPILED),
    )
    return [(suffix, mode, kind) for suffixes, mode, kind in kinds for suffix in suffixes]


def acquire_lock() -> None:
    """Does nothing: each module has its own lock."""


def release_lock() -> None:
    """Does nothing."""


def lock_held() -> bool:
    """Returns false."""
    return False


def is_builtin(name: str) -> int:
    """Returns 1 for a module that is part of the interpreter, else 0."""
    return int(name in sys.builtin_module_names)


def init_builtin(name: str) -> types.ModuleType | None:
    """Returns a module that is part of the interpreter; None for other modules."""
    return importlib.import_module(name) if is_builtin(name) else None


def find_module(name: str, path: list[str] | None = None) -> tuple[Any, str | None, tuple[str, str, int]]:
    """Finds a module: returns an open file or None, its path, and (suffix, mode, kind).

    Args:
      name: a name without dots.
      path: folders; None for `sys.path` and the interpreter's own modules.
    Raises:
      ImportError: there is no such module.
    """
    if path is None and is_builtin(name):
        return None, None, ("", "", C_BUILTIN)
    for folder in sys.path if path is None else path:
        place = os.path.join(folder, name)
        if any(os.path.isfile(os.path.join(place, f"__init__{end}")) for end in (".py", ".pyc")):
            return None, place, ("", "", PKG_DIRECTORY)
        for suffix, mode, kind in get_suffixes():
            if os.path.isfile(place + suffix):
                return _opened(place + suffix, mode), place + suffix, (suffix, mode, kind)
    raise ImportError(f"No module named {name!r}", name=name)


def _opened(path: str, mode: str) -> Any:
    file = io.open_code(path)  # noqa: SIM115 - the caller closes it
    if mode == "rb":
        return file
    encoding, _ = tokenize.detect_encoding(file.readline)
    file.seek(0)
    return io.TextIOWrapper(file, encoding, line_buffering=True)


def load_source(name: str, pathname: str, file: Any = None) -> types.ModuleType:
    """Loads the module of a source file; refills a module of that name in `sys.modules`."""
    return _load(name, pathname, _source_loader(name, pathname))


def load_compiled(name: str, pathname: str, file: Any = None) -> types.ModuleType:
    """Loads the module of a file of compiled code, likewise."""
    return _load(name, pathname, importlib.machinery.SourcelessFileLoader(name, pathname))


def load_dynamic(name: str, path: str, file: Any = None) -> types.ModuleType:
    """Loads the module of a library, likewise."""
    return _load(name, path, importlib.machinery.ExtensionFileLoader(name, path))


def load_package(name: str, path: str) -> types.ModuleType:
    """Loads a folder with an `__init__.py`, likewise."""
    file = os.path.join(path, "__init__.py") if os.path.isdir(path) else path
    return _load(name, file, _source_loader(name, file), [path])


def load_module(name: str, file: Any, filename: str, details: tuple[str, str, int]) -> types.ModuleType:
    """Loads the module that `find_module` has found.

    Raises:
      ImportError: it is of a kind that cannot be loaded.
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
    """Returns the loader that an import of the file would use: the user tree's for the user's files."""
    from tensorflow1_compat.proxies import is_of_tree
    from tensorflow1_compat.source import UserLoader

    return (UserLoader if is_of_tree(path) else importlib.machinery.SourceFileLoader)(name, path)


def _load(name: str, path: str, loader: Any, places: list[str] | None = None) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path, loader=loader, submodule_search_locations=places)
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
