"""Gives child processes of `multiprocessing` the TensorFlow of their parent.

A forked child has the parent's TensorFlow already. A spawned child runs the script again as `__mp_main__`. The parent
sends the path of the script as an object that prepares the child when the child unpickles it.
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

__all__ = ["load_main_of_parent", "prepare_spawned_children", "run_file"]


def prepare_spawned_children(tree: SourceTree, description: Any, prepare: Callable) -> None:
    """Prepares spawned child processes for the same tree and the same TensorFlow.

    Args:
      tree: the user's files.
      description: data that describe the TensorFlow of these files, such as the version; must be picklable.
      prepare: a module-level function that the child calls before it loads the script. Its arguments are the script's
        path, `roots` and `known_paths` of the tree, `description`, and the parent's `sys.path`; its result is the path.
    """
    get_plain_data = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        data = get_plain_data(name)
        path = data.get("init_main_from_path")
        if path is not None:
            data["init_main_from_path"] = _MainPath(path, tree, description, prepare)
        return data

    spawn.get_preparation_data = get_preparation_data


def run_file(path: str, namespace: dict[str, Any]) -> None:
    """Executes one of the user's files in a namespace, like `python path`."""
    with io.open_code(path) as file:
        code = compile_source(file.read(), path)
    prepare_namespace(namespace)
    exec(code, namespace)


class _MainPath(str):
    def __new__(cls, path: str, tree: SourceTree, description: Any, prepare: Callable) -> _MainPath:
        self = super().__new__(cls, path)
        self.tree, self.description, self.prepare = tree, description, prepare
        return self

    def __reduce__(self) -> Any:
        return self.prepare, (str(self), self.tree.roots, self.tree.known_paths, self.description, list(sys.path))


def load_main_of_parent() -> None:
    """Makes a child process compile and load the script like its parent."""
    spawn._fixup_main_from_path = _load_main


def _load_main(path: str) -> None:
    """Loads the script in a child process, in place of a function of `multiprocessing` that runs it in plain Python."""
    current = sys.modules["__main__"]
    if getattr(current, "__file__", None) == path:
        return
    spawn.old_main_modules.append(current)
    main = types.ModuleType("__mp_main__")
    main.__file__ = os.path.abspath(path)
    main.__dict__["__builtins__"] = __builtins__
    run_file(path, main.__dict__)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
