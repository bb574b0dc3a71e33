"""Executes the imports in the user's files: each function returns the objects that an import statement binds.

A module of the user's tree, such as a folder `keras` beside the script, has priority over a module of the same name.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

from tensorflow1_compat import proxies
from tensorflow1_compat.old_python.calls import (
    OldIndices,
    element_or_value,
    with_old_method,
    without_one_element_arrays,
)

__all__ = [
    "with_old_index",
    "with_old_method",
    "import_by_call",
    "import_module",
    "load",
    "load_root",
    "element_or_value",
    "without_one_element_arrays",
    "import_names",
    "import_all_names",
]


def with_old_index(value: Any) -> Any:
    """Returns a value for an index that is a list; an array of a script of TensorFlow 1 takes it as numpy 1.22 did."""
    is_array = proxies.serves_tensorflow_1() and isinstance(value, getattr(sys.modules.get("numpy"), "ndarray", ()))
    return OldIndices(value) if is_array else value


def load(name: str) -> Any:
    """Executes `import a.b as ...` for the name "a.b"; returns the module `a.b`."""
    if proxies.is_plain(name):
        return importlib.import_module(name)
    return proxies.proxy(name)


def load_root(name: str) -> Any:
    """Executes `import a.b` for the name "a.b"; returns the module `a`."""
    load(name)
    root = name.partition(".")[0]
    return sys.modules[root] if proxies.is_plain(root) else proxies.proxy(root)


def import_names(module: str, *names: str) -> tuple[Any, ...]:
    """Executes `from module import names`; returns the values of the names."""
    try:
        source = load(module)
        return tuple([_get_imported_name(source, module, name) for name in names])
    except ImportError as error:
        if getattr(error, "is_described", False):
            error.__traceback__ = None  # internal frames only confuse the reader
        raise


def import_all_names(module: str) -> None:
    """Executes `from module import *` in the caller's namespace."""
    source = load(module)
    namespace = sys._getframe(1).f_globals
    if isinstance(source, proxies.ModuleProxy):
        namespace.update(source.public_names())
        # Removed names only if the file mentions them, since each one is reported.
        gone = proxies.names_removed_from(module) & _names_mentioned_in(sys._getframe(1).f_code)
        namespace.update({name: source.value_of_import(name) for name in gone - namespace.keys()})
        return
    names = getattr(source, "__all__", None)
    for name in names if names is not None else [name for name in dir(source) if not name.startswith("_")]:
        namespace[name] = _get_imported_name(source, module, name)


def import_by_call(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
    """Replaces `__import__` in the user's files."""
    if level or name.partition(".")[0] not in proxies.ROOTS:
        return __import__(name, globals, locals, fromlist, level)
    return load(name) if fromlist else load_root(name)


def import_module(name: str, package: str | None = None) -> Any:
    """Replaces `importlib.import_module` in the user's files."""
    if name.partition(".")[0] in proxies.ROOTS:
        return load(name)
    return importlib.import_module(name, package)


def _names_mentioned_in(code: types.CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*map(_names_mentioned_in, inner))


def _get_imported_name(source: Any, module: str, name: str) -> Any:
    if isinstance(source, proxies.ModuleProxy):
        return source.value_of_import(name)
    try:
        return getattr(source, name)
    except AttributeError:
        pass
    try:
        return importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"{module}.{name}":
            raise
    place = getattr(source, "__file__", None) or "unknown location"
    raise ImportError(f"cannot import name {name!r} from {module!r} ({place})", name=module, path=place)
