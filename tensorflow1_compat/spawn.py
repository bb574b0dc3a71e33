"""Gives child processes of `multiprocessing` the TensorFlow of their parent.

A forked child has it already. A spawned child runs the script again as `__mp_main__`; it gets the script's path as an
object that prepares the child while it is unpickled.
"""

from __future__ import annotations

import io
import os
import sys
import types
from collections.abc import Callable
from multiprocessing import spawn
from typing import Any

from tensorflow1_compat.source import compile_source, prepare_namespace
from tensorflow1_compat.tree import SourceTree

__all__ = ["follow", "load_main_of_parent", "run_file"]


def follow(tree: SourceTree, sees: Any, prepare: Callable) -> None:
    """Makes spawned children be prepared for the same tree and the same TensorFlow.

    Args:
      tree: the user's files.
      sees: the TensorFlow of the files, as plain data.
      prepare: a module-level function, called in the child before it loads the script, with the path of the script, the
      tree's `roots` and `known_paths`, `sees` and the parent's `sys.path`. It returns the path.
    """
    ask = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        data = ask(name)
        path = data.get("init_main_from_path")
        if path is not None:
            data["init_main_from_path"] = _MainPath(path, tree, sees, prepare)
        return data

    spawn.get_preparation_data = get_preparation_data


def run_file(path: str, namespace: dict[str, Any]) -> None:
    """Executes one of the user's files in a namespace, as `python path` does."""
    with io.open_code(path) as file:
        code = compile_source(file.read(), path)
    prepare_namespace(namespace)
    exec(code, namespace)


class _MainPath(str):
    def __new__(cls, path: str, tree: SourceTree, sees: Any, prepare: Callable) -> _MainPath:
        self = super().__new__(cls, path)
        self.tree, self.sees, self.prepare = tree, sees, prepare
        return self

    def __reduce__(self) -> Any:
        return self.prepare, (str(self), self.tree.roots, self.tree.known_paths, self.sees, list(sys.path))


def load_main_of_parent() -> None:
    """Makes a child load the script as its parent did."""
    spawn._fixup_main_from_path = _load_main


def _load_main(path: str) -> None:
    """Works as the function it replaces, but compiles the script as the parent did."""
    current = sys.modules["__main__"]
    if getattr(current, "__file__", None) == path:
        return
    spawn.old_main_modules.append(current)
    main = types.ModuleType("__mp_main__")
    main.__file__ = os.path.abspath(path)
    main.__dict__["__builtins__"] = __builtins__
    run_file(path, main.__dict__)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
