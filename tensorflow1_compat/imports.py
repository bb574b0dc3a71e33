"""Executes the imports of the user's files: each function returns the objects that a statement binds.

Modules that the user's tree has under the same name (a folder `keras` beside the script) are the user's.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

from tensorflow1_compat import proxies
from tensorflow1_compat.old_python.calls import having, single, singles

__all__ = [
    "having",
    "import_by_call",
    "import_module",
    "load",
    "load_root",
    "single",
    "singles",
    "take",
    "take_all",
]


def load(name: str) -> Any:
    """`import name as ...`."""
    if proxies.is_plain(name):
        return importlib.import_module(name)
    return proxies.proxy(name)


def load_root(name: str) -> Any:
    """`import name`, which binds the first part of it."""
    load(name)
    root = name.partition(".")[0]
    return sys.modules[root] if proxies.is_plain(root) else proxies.proxy(root)


def take(module: str, *names: str) -> tuple[Any, ...]:
    """`from module import names`."""
    try:
        source = load(module)
        return tuple([_take(source, module, name) for name in names])
    except ImportError as error:
        if getattr(error, "is_described", False):
            error.__traceback__ = None  # the way to it is nobody's concern
        raise


def take_all(module: str) -> None:
    """`from module import *`, into the namespace of the caller."""
    source = load(module)
    namespace = sys._getframe(1).f_globals
    if isinstance(source, proxies.ModuleProxy):
        namespace.update(source.public_names())
        # Names that are gone only where the file says them, since each is reported.
        gone = proxies.removed_from(module) & _said_in(sys._getframe(1).f_code)
        namespace.update({name: source.take(name) for name in gone - namespace.keys()})
        return
    names = getattr(source, "__all__", None)
    for name in names if names is not None else [name for name in dir(source) if not name.startswith("_")]:
        namespace[name] = _take(source, module, name)


def import_by_call(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
    """`__import__` as the user's files call it."""
    if level or name.partition(".")[0] not in proxies.ROOTS:
        return __import__(name, globals, locals, fromlist, level)
    return load(name) if fromlist else load_root(name)


def import_module(name: str, package: str | None = None) -> Any:
    """`importlib.import_module` as the user's files call it."""
    if name.partition(".")[0] in proxies.ROOTS:
        return load(name)
    return importlib.import_module(name, package)


def _said_in(code: types.CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*map(_said_in, inner))


def _take(source: Any, module: str, name: str) -> Any:
    if isinstance(source, proxies.ModuleProxy):
        return source.take(name)
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
