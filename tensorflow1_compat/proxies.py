"""Provides proxies of modules for the user's files, with names of older TensorFlow, Keras, numpy and Python.

A proxy stands for a real module, its base. The proxy looks up a name in the tables, then in the base, then among the
base's submodules. Classes and functions are the real ones, so `isinstance` and pickling work. Attributes that the
user's files set on a proxy are also set on the base.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import importlib.util
import types
from collections.abc import Iterator
from typing import Any

from npu_bridge.base.lazy import import_module_or_object
from npu_bridge.base.tf_internals.names import KERAS
from tensorflow1_compat import journal, missing
from tensorflow1_compat.insides import find_moved_value, find_replacement_of_contrib, find_replacement_of_inner_module
from tensorflow1_compat.old_python import removed_names
from tensorflow1_compat.tables import INSIDES, OF_1, NameTables
from tensorflow1_compat.tree import SourceTree

__all__ = [
    "MENTIONS",
    "ROOTS",
    "ModuleProxy",
    "canonical_name",
    "is_user_file",
    "is_plain",
    "proxy",
    "names_removed_from",
    "proxies_without_tree",
    "serve_proxies",
    "serves_tensorflow_1",
]

_TENSORFLOW_ROOTS = ("tensorflow", "keras")
_CONTRIB = "tensorflow.contrib"
# Bases whose submodules are of version 2, or have already been searched as attributes.
_INTERFACES = ("tensorflow._api", "tensorflow.compat", f"{KERAS}.api")
# Bases that do not change once they are loaded, so their names can be kept.
_CONSTANT = ("tensorflow._api", f"{KERAS}.api", "npu_bridge")
_REMOVED = (*removed_names.GONE_NAMES, *removed_names.GONE_MODULES, *removed_names.WRAPPED)
_BELOW_REMOVED = {key.rpartition(".")[0] for key in _REMOVED if "." in key}.union(
    removed_names.GONE_MODULES,
    removed_names.UP,
    (key for key, place in removed_names.WRAPPED.items() if ":" not in place),
)
# Names for which a file's import of a root is redirected; roots not listed here always are, because files pass them on.
MENTIONS: dict[str, set[str]] = {}
for _key in _REMOVED:
    MENTIONS.setdefault(_key.partition(".")[0], set()).add(_key.rpartition(".")[2])
del MENTIONS["numpy"]
_OWN_NAME = "tensorflow_core"  # the package that holds the files of TensorFlow 1.15
ROOTS = frozenset(
    {*_TENSORFLOW_ROOTS, _OWN_NAME, "npu_bridge", "npu_ops", *(name.partition(".")[0] for name in _BELOW_REMOVED)}
)

_proxies: dict[str, ModuleProxy] = {}
_tree: SourceTree | None = None
_tables: NameTables = OF_1


def serve_proxies(tree: SourceTree | None, tables: NameTables = OF_1) -> None:
    """Makes the script's files (`tree`) import proxies of TensorFlow with the names in `tables`."""
    global _tree, _tables
    _tree, _tables = tree, tables
    _proxies.clear()


@contextlib.contextmanager
def proxies_without_tree(tables: NameTables) -> Iterator[None]:
    """Makes `proxy` return modules with the names of other tables in a block; the script's proxies stay as they are."""
    before, made = (_tree, _tables), dict(_proxies)
    serve_proxies(None, tables)
    try:
        yield
    finally:
        serve_proxies(*before)
        _proxies.update(made)


def serves_tensorflow_1() -> bool:
    """Returns whether the user's files are for TensorFlow 1."""
    return _tables is OF_1


def is_plain(name: str) -> bool:
    """Returns whether imports of a module return the real module rather than a proxy."""
    root = name.partition(".")[0]
    if _tree is not None and _tree.contains_module(root):
        return True
    if root in _TENSORFLOW_ROOTS:
        return root not in _tables.roots
    if name in _tables.modules:
        return False
    if root == _OWN_NAME:
        return root not in _tables.same
    if root == "npu_bridge":
        return f"{name}.tf" not in _tables.same
    return not _has_removed_names(name)


def is_user_file(path: str) -> bool:
    """Returns whether a file belongs to the user's files, whose imports get proxies."""
    return _tree is not None and _tree.contains_file(path)


def names_removed_from(module: str) -> set[str]:
    """Returns the names that `from module import *` bound in an old version of the module and no longer binds."""
    own = {key.rpartition(".")[2] for key in removed_names.GONE_NAMES if key.rpartition(".")[0] == module}
    return own - vars(builtins).keys()


def proxy(name: str) -> ModuleProxy:
    """Returns the proxy of a module under its old name.

    Raises:
      ModuleNotFoundError: no module has this name; the message names a replacement.
    """
    name = canonical_name(name)
    found = _proxies.get(name)
    if found is None:
        base = _import_proxied_module(name)
        if effect := _tables.effects.get(name.partition(".")[0]):
            import_module_or_object(effect)()
        found = base if isinstance(base, ModuleProxy) else _proxies.setdefault(name, ModuleProxy(name, base))
    return found


class ModuleProxy(types.ModuleType):
    """A proxy of a module under an old name.

    Args:
      name: the old name.
      base: the real module.
    """

    def __init__(self, name: str, base: types.ModuleType):
        super().__init__(name, base.__doc__)
        is_constant = base.__name__.startswith(_CONSTANT) or name.partition(".")[0] not in _TENSORFLOW_ROOTS
        self.__dict__.update(_name=name, _base=base, _is_constant=is_constant)
        for special in ("__file__", "__path__", "__spec__", "__loader__", "__package__"):
            if special in base.__dict__:
                self.__dict__[special] = base.__dict__[special]

    def __getattr__(self, name: str) -> Any:
        try:
            value = _find_value(self, name)
        except _MissingNameError:
            if name.startswith("__"):
                raise AttributeError(f"module {self._name!r} has no attribute {name!r}") from None
            raise AttributeError(missing.describe_missing_name(f"{self._name}.{name}", dir(self), _tables)) from None
        if self._is_constant:
            self.__dict__[name] = value
        return value

    def value_of_import(self, name: str) -> Any:
        """Returns the value that `from module import name` binds, for the module of this proxy.

        Raises:
          ImportError: the module has no such name.
        """
        if name in self.__dict__:
            return self.__dict__[name]
        try:
            return _find_value(self, name)
        except _MissingNameError:
            raise missing.import_error(f"{self._name}.{name}", dir(self), _tables) from None

    def public_names(self) -> dict[str, Any]:
        """Returns the names that `from module import *` binds, with their values, for the module of this proxy."""
        names = getattr(self._base, "__all__", None) or [name for name in dir(self._base) if not name.startswith("_")]
        if self._base.__name__.startswith("tensorflow1_compat."):
            names = [name for name in names if not self._is_foreign_module(name)]
        if self._name.partition(".")[0] in _TENSORFLOW_ROOTS:
            names = [*names, *_list_names_added_to_module(self._name)]
        found = {}
        for name in names:
            try:
                found[name] = self.__dict__[name] if name in self.__dict__ else _find_value(self, name)
            except _MissingNameError:
                continue
        return found

    def _is_foreign_module(self, name: str) -> bool:
        """Returns whether a name is only the base's short name for a module, such as `tf`; `nest` is exported."""
        value = self._base.__dict__.get(name)
        return isinstance(value, types.ModuleType) and value.__name__.rpartition(".")[2] != name

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._base, name, value)
        if self._is_constant:
            self.__dict__[name] = value

    def __delattr__(self, name: str) -> None:
        delattr(self._base, name)
        self.__dict__.pop(name, None)

    def __dir__(self) -> list[str]:
        own = [name for name in self.__dict__ if not name.startswith("_")]
        return sorted({*dir(self._base), *own, *_list_names_added_to_module(self._name)})

    def __repr__(self) -> str:
        return repr(self._base).replace(self._base.__name__, self._name, 1)

    def __reduce__(self) -> Any:
        return proxy, (self._name,)


class _MissingNameError(Exception):
    """An exception for a name that neither the tables nor the installed modules have."""


def _find_value(module: ModuleProxy, name: str) -> Any:
    """Returns the value of a name in a proxy; raises `_MissingNameError` if the name does not exist."""
    full, base = f"{module._name}.{name}", module._base
    if full in _tables.versions:
        return _tables.versions[full]
    if canonical_name(full) != full:
        return proxy(full)
    if full in _tables.names:
        journal.record_use("name", full, _tables.names[full])
        return _proxy_if_module(full, import_module_or_object(_tables.names[full]))
    if full in removed_names.WRAPPED:
        return import_module_or_object(removed_names.WRAPPED[full])
    is_reused = full in removed_names.REUSED and serves_tensorflow_1()
    if full in removed_names.GONE_NAMES and (is_reused or name not in base.__dict__):
        place = removed_names.GONE_NAMES[full]
        fate = "means something else by it now" if name in base.__dict__ else "no longer has it"
        journal.say_once(full, f"{base.__name__} {fate}; {place.replace(':', '.')} is used")
        return import_module_or_object(place)
    if name.startswith("__"):
        try:
            return getattr(base, name)
        except AttributeError:
            raise _MissingNameError from None
    if full in _tables.modules or full in removed_names.GONE_MODULES:
        return proxy(full)
    inner = find_replacement_of_inner_module(full)
    try:
        value = _find_in_base(full, base, name)
    except _MissingNameError:
        value = None if inner else _find_value_in_parent_module(full)
    if inner is not None and not isinstance(value, types.ModuleType):
        value = importlib.import_module(inner)
    return _proxy_if_module(full, value)


def _find_value_in_parent_module(full_name: str) -> Any:
    """Returns the value of a name that has moved to the parent module, or out of an internal module of contrib.

    For any name below `tensorflow.contrib.X.python`, searches the module of this package that replaces `X`.
    """
    module, _, name = full_name.rpartition(".")
    for part, above in removed_names.UP.items():
        if f"{module}.".startswith(f"{part}."):
            return _find_value(proxy(above), name)
    parts = full_name.split(".")
    if not full_name.startswith(f"{_CONTRIB}.") or len(parts) < 5 or parts[3] != "python":
        raise _MissingNameError
    try:
        return getattr(importlib.import_module(find_replacement_of_contrib(full_name)), parts[-1])
    except AttributeError:
        raise _MissingNameError from None


def _find_in_base(full_name: str, base: types.ModuleType, name: str) -> Any:
    try:
        return getattr(base, name)
    except AttributeError:
        pass
    below = f"{base.__name__}.{name}"
    if not base.__name__.startswith(_INTERFACES):
        candidates = [below]
    else:
        candidates = [full_name] if full_name.startswith((*INSIDES, "keras.")) else []
    if full_name.startswith("keras."):
        candidates.append(f"{KERAS}.src.{full_name[6:]}")
    for candidate in candidates:
        try:
            return importlib.import_module(candidate)
        except ModuleNotFoundError as error:
            if not candidate.startswith(error.name or "\n"):
                raise
    try:
        return find_moved_value(base.__name__, name)
    except AttributeError:
        return _find_in_version_2(full_name)


def _find_in_version_2(full_name: str) -> Any:
    """Returns a function or class that only TensorFlow 2 has, such as `tf.nn.gelu`, for scripts of both versions.

    Names directly below `tf` are left out, because scripts use them to determine the version.
    """
    root, *path = full_name.split(".")
    if root != "tensorflow" or len(path) < 2 or path[0] in ("compat", "contrib"):
        raise _MissingNameError
    value: Any = importlib.import_module("tensorflow")
    for part in path:
        value = getattr(value, part, None)
    if value is None or isinstance(value, types.ModuleType):
        raise _MissingNameError
    journal.record_use("name", full_name, f"tensorflow 2's {'.'.join(path)}")
    return value


def _proxy_if_module(full_name: str, value: Any) -> Any:
    """Returns a proxy for a module of TensorFlow or a module with removed names; returns other values unchanged."""
    if not isinstance(value, types.ModuleType) or isinstance(value, ModuleProxy):
        return value
    if full_name.startswith(_CONTRIB):
        journal.record_use("name", full_name, value.__name__)
    if full_name.partition(".")[0] in _TENSORFLOW_ROOTS or _has_removed_names(full_name):
        return _proxies.setdefault(full_name, ModuleProxy(full_name, value))
    return value


def _import_proxied_module(name: str) -> types.ModuleType:
    target = _tables.modules.get(name)
    if target is None and ":" not in removed_names.WRAPPED.get(name, ":"):
        target = removed_names.WRAPPED[name]
    elif target is None and name in removed_names.GONE_MODULES:
        target = name if _is_importable(name) else removed_names.GONE_MODULES[name]
        if target != name:
            journal.say_once(name, f"no longer there; {target} is used")
    if target is not None:
        if target.partition(".")[0] == "tf_slim":
            importlib.import_module("tensorflow1_compat.contrib.slim")  # patches TF-Slim
        return importlib.import_module(target)
    parent, _, leaf = name.rpartition(".")
    if not parent or parent == "npu_bridge":
        return importlib.import_module(name)
    above = proxy(parent)
    try:
        value = _find_value(above, leaf)
    except _MissingNameError:
        raise missing.import_error(name, dir(above), _tables, ModuleNotFoundError) from None
    if not isinstance(value, types.ModuleType):
        kind = type(value).__name__
        raise ModuleNotFoundError(f"No module named {name!r}; in {parent!r} this name is a {kind}", name=name)
    return value


def canonical_name(name: str) -> str:
    """Returns the name below `tensorflow` of a name such as `tensorflow_core.nn.relu`; other names as they are."""
    for prefix, same in _tables.same.items():
        if name == prefix or name.startswith(prefix + "."):
            return same + name[len(prefix) :]
    return name


def _is_importable(name: str) -> bool:
    """Returns whether a module with this name is installed."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _has_removed_names(name: str) -> bool:
    if any(name.startswith(f"{part}.") for part in removed_names.UP):
        return True
    return any(below == name or below.startswith(f"{name}.") for below in _BELOW_REMOVED)


def _list_names_added_to_module(module: str) -> set[str]:
    """Returns the old names that the tables add to a module."""
    start = f"{module}."
    return {key[len(start) :].partition(".")[0] for key in (*_tables.names, *_tables.modules) if key.startswith(start)}
