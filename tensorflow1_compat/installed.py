"""Whether a dotted old name is found here, told from the installed files alone: TensorFlow is not started.

The files of TensorFlow's interface are lists of imports; other modules are searched for what they define at their top.
Where a file could define more than can be read (stars, `__getattr__`), a name counts as found.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import os

from npu_bridge.base.reading import open_file
from npu_bridge.base.search import search
from tensorflow1_compat.insides import SPLIT, inner_module, module_around
from tensorflow1_compat.tables import INSIDES, MODULES, NAMES

__all__ = ["find_missing"]

_API = {
    "tensorflow.compat.v1": "tensorflow._api.v2.compat.v1",
    "tensorflow": "tensorflow._api.v2.compat.v1",
    "tensorflow.contrib": "tensorflow1_compat.contrib",
    "tensorflow.layers": "keras.api._v1.keras.__internal__.legacy.layers",
    "tensorflow.nn.rnn_cell": "keras.api._v1.keras.__internal__.legacy.rnn_cell",
    "tensorflow.keras": "keras.api._v1.keras",
    "tensorflow.estimator": "tensorflow_estimator.python.estimator.api._v1.estimator",
    "npu_bridge.npu_init.tf": "tensorflow._api.v2.compat.v1",
}
_ANYTHING = "*"
# What a module may define names in the parts of.
_COMPOUND = (ast.If, ast.Try, ast.With, ast.For, ast.ExceptHandler)


def find_missing(name: str) -> str | None:
    """The shortest part of a name that is not there, as far as modules can be followed; None if all of it is."""
    for same in ("npu_bridge.npu_init.tf", "tensorflow.compat.v1", "tensorflow._api.v1"):
        if name == same or name.startswith(f"{same}."):
            name = "tensorflow" + name[len(same) :]
    parts = name.split(".")
    real: str | None = MODULES.get(parts[0], parts[0])
    real = _API.get(parts[0], real)
    for number in range(1, len(parts)):
        old = ".".join(parts[: number + 1])
        if old in NAMES:
            place, _, inside = NAMES[old].partition(":")
            if inside or _file_of(place) is None:
                return None
            real = place
        elif old in MODULES or old in _API:
            real = _API.get(old) or _API.get(MODULES[old]) or MODULES[old]
        elif (below := f"{real}.{parts[number]}") and _file_of(below):
            real = below
        elif parts[0] == "keras" and _file_of(f"keras.src.{'.'.join(parts[1 : number + 1])}"):
            real = f"keras.src.{'.'.join(parts[1 : number + 1])}"
        elif old.startswith(INSIDES) and _file_of(old):
            real = old
        elif _is_below(old, MODULES) and parts[number] not in _names_of(real):
            continue
        elif parts[number] not in _names_of(real) and (inner := inner_module(old)):
            real = inner
        else:
            parts_of_real = SPLIT.get((real or "").removeprefix("tensorflow.python."), "").split()
            defined = _names_of(real).union(*(_names_of(f"tensorflow.python.{part}") for part in parts_of_real))
            if parts[1:4:2] == ["contrib", "python"]:
                defined |= _names_of(module_around(old))
            if parts[number] in defined or _ANYTHING in defined or parts[number].startswith("__"):
                return None  # a class, a function or an object: what it has is not in files
            return None if _is_below(old, NAMES) else old
    return None


def _is_below(name: str, table: dict[str, str]) -> bool:
    return any(key.startswith(f"{name}.") for key in table)


@functools.cache
def _file_of(module: str) -> str | None:
    """The file of a module, found without importing what is above it; None if there is none."""
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
def _names_of(module: str) -> frozenset[str]:
    """What a module's file defines at its top, also inside conditions; with `*` where there may be more."""
    path = _file_of(module)
    if path is None or not path.endswith(".py"):
        return frozenset([_ANYTHING])
    with open_file(path, "rb") as file:
        source = file.read()
    if path.endswith("_pb2.py") or b"globals()" in source:
        return frozenset([_ANYTHING])
    tree = ast.parse(source)
    found: set[str] = set()
    for node in search(tree.body, lambda node: ast.iter_child_nodes(node) if isinstance(node, _COMPOUND) else ()):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            found.add(_ANYTHING if node.name == "__getattr__" else node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found.update((alias.asname or alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}
            found.update(_ANYTHING if name == "__getattr__" else name for name in names)
    return frozenset(found)
