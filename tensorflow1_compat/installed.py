"""Lists the names that installed modules define, from their files, without importing TensorFlow.

The files of TensorFlow's interface are lists of imports; other modules are searched for top-level definitions. If a
file can define names that its text does not show (star imports, `__getattr__`), every name counts as defined.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
from collections.abc import Iterable, Iterator

from npu_bridge.base.reading import open_file
from npu_bridge.base.search import search
from npu_bridge.base.tf_internals.names import KERAS
from tensorflow1_compat.tables import INSIDES, MODULES, OF_1

__all__ = ["is_installed", "list_exported_names", "names_defined_in"]

# Where the names of modules are defined that a script of TensorFlow 1 imports.
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


def is_installed(name: str) -> bool:
    """Returns whether the installed packages themselves define a name; replacements of this package do not count."""
    start = "tensorflow.compat.v1."
    parts = (f"{_API[start[:-1]]}.{name[len(start) :]}" if name.startswith(start) else name).split(".")
    for length in range(len(parts), 0, -1):
        if _file_of_module(module := ".".join(parts[:length])):
            return length == len(parts) or not names_defined_in(module).isdisjoint((parts[length], _ANYTHING))
    return False


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


def names_defined_in(module: str) -> frozenset[str]:
    """Returns the names that a module defines at its top level, also in conditions.

    The result includes "*" if the module can define names that its text does not show.
    """
    return _read_definitions(module)[0]


def list_exported_names(module: str) -> list[str]:
    """Returns the names that `from module import *` binds, for the module of a script of TensorFlow 1."""
    names, exported = _read_definitions(_find_module_with_file(module))
    return [name for name in names if not name.startswith("_")] if exported is None else exported


def _find_module_with_file(name: str) -> str:
    """Returns the installed module with the names of a module that a script of TensorFlow 1 imports."""
    for same in OF_1.same:
        if name == same or name.startswith(f"{same}."):
            name = "tensorflow" + name[len(same) :]
    parts, candidates = name.split("."), []
    for length in range(len(parts), 0, -1):
        known = ".".join(parts[:length])
        real = MODULES.get(known, known)
        if known in MODULES or known in _API:
            candidates.append(".".join([_API.get(known) or _API.get(real) or real, *parts[length:]]))
        elif length == len(parts) and name.startswith(INSIDES):
            candidates.append(name)
    if parts[0] == "keras":
        candidates.append(".".join([f"{KERAS}.src", *parts[1:]]))
    return next((each for each in candidates if _file_of_module(each)), name)


@functools.cache
def _read_definitions(module: str) -> tuple[frozenset[str], list[str] | None]:
    """Returns the names that a module defines, and its `__all__`: None if it has none, ["*"] if it is computed."""
    path = _file_of_module(module)
    if path is None or not path.endswith(".py") or path.endswith("_pb2.py"):
        return frozenset({_ANYTHING}), None
    with open_file(path, "rb") as file:
        source = file.read()
    package = module if path.endswith("__init__.py") else module.rpartition(".")[0]
    # In the files of TensorFlow's interface, `globals()` adds no names that are not in the text. In other files, such a
    # statement changes the names that a star import binds.
    adds_names = (b"globals()" in source or b".__all__ = " in source) and not module.startswith("tensorflow._api.")
    names, exported = {_ANYTHING} if adds_names else set(), None
    for statement in search(ast.parse(source).body, _nested_statements):
        if isinstance(statement, ast.Import) and module.startswith("tensorflow1_compat."):
            continue  # no part of the module that it replaces
        defined = set(_list_defined_names(statement, package))
        names |= {_ANYTHING} if "__getattr__" in defined else defined
        if "__all__" in defined:
            is_whole = isinstance(statement, ast.Assign) and exported is None
            exported = _read_list(statement.value) if is_whole else [_ANYTHING]
    return frozenset(names), exported


def _nested_statements(node: ast.AST) -> Iterable[ast.AST]:
    return ast.iter_child_nodes(node) if isinstance(node, _COMPOUND) else ()


def _list_defined_names(statement: ast.AST, package: str) -> Iterator[str]:
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
        yield statement.name
    elif isinstance(statement, ast.Import):
        for alias in statement.names:
            yield alias.asname or alias.name.partition(".")[0]
    elif isinstance(statement, ast.ImportFrom):
        above = package.rsplit(".", statement.level - 1)[0] if statement.level else ""
        for alias in statement.names:
            if alias.name == "*":
                yield from list_exported_names(".".join(filter(None, [above, statement.module])))
            else:
                yield alias.asname or alias.name
    elif isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
            yield from (each.id for each in ast.walk(target) if isinstance(each, ast.Name))


def _read_list(value: ast.expr) -> list[str]:
    try:
        return list(ast.literal_eval(value))
    except ValueError:  # the value is computed
        return [_ANYTHING]
