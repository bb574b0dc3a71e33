"""Determines from the installed files whether a dotted old name exists, without importing TensorFlow.

The files of TensorFlow's interface are lists of imports; other modules are searched for top-level definitions. If a
file can define names that its text does not show (star imports, `__getattr__`), every name counts as found.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from npu_bridge.base.reading import open_file
from npu_bridge.base.search import search
from npu_bridge.base.tf_internals.names import KERAS
from tensorflow1_compat.insides import SPLIT, find_replacement_of_contrib, find_replacement_of_inner_module
from tensorflow1_compat.tables import INSIDES, MODULES, NAMES, OF_1

__all__ = [
    "NameLocation",
    "is_defined_in",
    "list_exported_names",
    "find_missing",
    "is_installed",
    "locate_name",
    "locate_definition",
    "names_defined_in",
    "names_of_same_module",
]

_API = {
    "tensorflow.compat.v1": "tensorflow._api.v2.compat.v1",
    "tensorflow": "tensorflow._api.v2.compat.v1",
    "tensorflow.contrib.keras": f"{KERAS}.api._v1.keras",
    "tensorflow.layers": f"{KERAS}.api._v1.keras.__internal__.legacy.layers",
    "tensorflow.nn.rnn_cell": f"{KERAS}.api._v1.keras.__internal__.legacy.rnn_cell",
    "tensorflow.estimator": "tensorflow_estimator.python.estimator.api._v1.estimator",
}
_ANYTHING = "*"
# Statements of a module whose parts can define names.
_COMPOUND = (ast.If, ast.Try, ast.With, ast.For, ast.ExceptHandler)


class NameLocation(NamedTuple):
    """The module in which the search for a dotted name ended.

    Attributes:
      module: name of the module.
      inside: the rest of the name, inside the module.
      missing: the shortest prefix of the name that does not exist, or None.
    """

    module: str
    inside: tuple[str, ...] = ()
    missing: str | None = None


def find_missing(name: str) -> str | None:
    """Returns the shortest prefix of a dotted name that does not exist; None if the name exists or can exist."""
    return _locate_name_part_by_part(name).missing


def names_of_same_module(missing_name: str) -> frozenset[str]:
    """Returns all names of the module that should contain a missing name."""
    return names_defined_in(_locate_name_part_by_part(missing_name).module)


def locate_name(name: str) -> NameLocation | None:
    """Returns the place where a name of a script is defined; None if the name does not exist."""
    found = _locate_name_part_by_part(name)
    return None if found.missing else found


def locate_definition(name: str) -> NameLocation | None:
    """Returns the place where a name in an installed file is defined; None if no such module exists.

    Unlike `locate_name`, takes names as they are: `keras` is the installed Keras.
    """
    if name.startswith("tensorflow.compat.v1."):
        return locate_name(name)
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        if _file_of_module(module := ".".join(parts[:length])):
            return NameLocation(module, tuple(parts[length:]))
    return None


def is_installed(name: str) -> bool:
    """Returns whether the installed packages themselves define a name; replacements of this package do not count."""
    found = locate_definition(name)
    if found is None or not found.inside:
        return found is not None
    return not names_defined_in(found.module).isdisjoint((found.inside[0], _ANYTHING))


@functools.cache
def _locate_name_part_by_part(dotted_name: str) -> NameLocation:
    for same in OF_1.same:
        if dotted_name == same or dotted_name.startswith(f"{same}."):
            dotted_name = "tensorflow" + dotted_name[len(same) :]
    parts = dotted_name.split(".")
    real: str = MODULES.get(parts[0], parts[0])
    real = _API.get(parts[0], real)
    for number in range(1, len(parts)):
        old, rest = ".".join(parts[: number + 1]), tuple(parts[number:])
        if old in NAMES:
            place, _, inside = NAMES[old].partition(":")
            if inside or _file_of_module(place) is None:
                return NameLocation(place, (*filter(None, inside.split(".")), *rest[1:]))
            real = place
        elif old in MODULES or old in _API:
            real = _API.get(old) or _API.get(MODULES[old]) or MODULES[old]
        elif (below := f"{real}.{parts[number]}") and _file_of_module(below):
            real = below
        elif parts[0] == "keras" and _file_of_module(f"{KERAS}.src.{'.'.join(parts[1 : number + 1])}"):
            real = f"{KERAS}.src.{'.'.join(parts[1 : number + 1])}"
        elif old.startswith(INSIDES) and _file_of_module(old):
            real = old
        elif _is_below_listed_name(old, MODULES) and parts[number] not in names_defined_in(real):
            continue
        elif parts[number] not in names_defined_in(real) and (inner := find_replacement_of_inner_module(old)):
            real = inner
        else:
            parts_of_real = SPLIT.get((real or "").removeprefix("tensorflow.python."), "").split()
            defined = names_defined_in(real).union(
                *(names_defined_in(f"tensorflow.python.{part}") for part in parts_of_real)
            )
            if parts[1:4:2] == ["contrib", "python"]:
                defined |= names_defined_in(find_replacement_of_contrib(old))
            if parts[number] in defined or _ANYTHING in defined or parts[number].startswith("__"):
                return NameLocation(real, rest)  # a class, a function or an object, whose attributes are not in files
            if _is_below_listed_name(old, NAMES) or _is_of_version_2(parts):
                return NameLocation(real, rest)
            return NameLocation(real, rest, missing=old)
    return NameLocation(real)


def _is_of_version_2(parts: list[str]) -> bool:
    """Returns whether TensorFlow 2 has a name, given by its parts; scripts of TensorFlow 1 find such names, too."""
    return (
        len(parts) > 2 and parts[0] == "tensorflow" and parts[2] in names_defined_in(f"tensorflow._api.v2.{parts[1]}")
    )


def _is_below_listed_name(name: str, table: dict[str, str]) -> bool:
    return any(key.startswith(f"{name}.") for key in table)


@functools.cache
def _file_of_module(module: str) -> str | None:
    """Returns the file of a module, without importing the module's packages; None if no file is found."""
    parts = module.split(".")
    try:
        spec = importlib.util.find_spec(parts[0])
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.submodule_search_locations:
        return spec.origin if spec is not None and len(parts) == 1 else None
    for folder in spec.submodule_search_locations:
        at = os.path.join(folder, *parts[1:])
        for path in (os.path.join(at, "__init__.py"), f"{at}.py"):
            if os.path.isfile(path):
                return path
        if len(parts) > 1 and os.path.isdir(at):
            return at
        above, leaf = os.path.split(at)
        if os.path.isdir(above) and any(n.startswith(f"{leaf}.") and n.endswith(".so") for n in os.listdir(above)):
            return above
    return None


@functools.cache
def names_defined_in(module: str) -> frozenset[str]:
    """Returns the names that a module defines at its top level, also in conditions.

    The result includes "*" if the module can define names that its text does not show.
    """
    return frozenset(_definitions_by_name(module))


def is_defined_in(module: str, name: str) -> list[ast.FunctionDef | ast.ClassDef | ast.Assign | str | None]:
    """Returns the definitions of a name at the top level of a module.

    Each is a syntax node, the full name of an imported object, or None for any other kind of definition.
    """
    return list(_definitions_by_name(module).get(name, ()))


@functools.cache
def _definitions_by_name(module: str) -> dict[str, list[Any]]:
    path = _file_of_module(module)
    if path is None or not path.endswith(".py"):
        return {_ANYTHING: []}
    with open_file(path, "rb") as file:
        source = file.read()
    if path.endswith("_pb2.py"):
        return {_ANYTHING: []}
    package = module if path.endswith("__init__.py") else module.rpartition(".")[0]
    tree = ast.parse(source)
    # In the files of TensorFlow's interface, `globals()` adds no names that are not in the text. In other files, such a
    # statement changes the names that a star import binds.
    adds_names = (b"globals()" in source or b".__all__ = " in source) and not module.startswith("tensorflow._api.")
    found: dict[str, list[Any]] = {_ANYTHING: []} if adds_names else {}
    for top in tree.body:
        defined = [pair for node in search([top], _nested_statements) for pair in _list_definitions(node, package)]
        for name, _ in [] if isinstance(top, _COMPOUND) else defined:
            found.pop(name, None)  # a later definition replaces an earlier one, unless it is in a branch
        for name, what in defined:
            found.setdefault(_ANYTHING if name == "__getattr__" else name, []).append(what)
    return found


def _nested_statements(node: ast.AST) -> Iterable[ast.AST]:
    return ast.iter_child_nodes(node) if isinstance(node, _COMPOUND) else ()


def _list_definitions(statement: ast.AST, package: str) -> Iterator[tuple[str, Any]]:
    """Yields the names that a statement defines, each with its definition as in `is_defined_in`."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
        yield statement.name, statement
    elif isinstance(statement, ast.Import):
        for alias in statement.names:
            name = alias.asname or alias.name.partition(".")[0]
            yield name, alias.name if alias.asname else name
    elif isinstance(statement, ast.ImportFrom):
        above = package.rsplit(".", statement.level - 1)[0] if statement.level else ""
        module = ".".join(filter(None, [above, statement.module]))
        for alias in statement.names:
            for name in list_exported_names(module) if alias.name == "*" else [alias.name]:
                yield alias.asname or name, f"{module}.{name}"
    elif isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        is_plain = isinstance(statement, ast.Assign) and all(isinstance(target, ast.Name) for target in targets)
        for name in {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}:
            yield name, statement if is_plain else None


def list_exported_names(module: str) -> list[str]:
    """Returns the names that `from module import *` binds."""
    found = locate_name(module)
    index = _definitions_by_name(found.module if found and not found.inside else module)
    for node in index.get("__all__", ()):
        try:
            return list(ast.literal_eval(node.value))
        except (ValueError, AttributeError):  # the value is computed
            return [_ANYTHING]
    return [name for name in index if not name.startswith("_")]
