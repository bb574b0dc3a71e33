"""Child processes of `multiprocessing` see what their parent sees.

A forked child has it already. A spawned one runs the script anew as `__mp_main__`; what tells it the script's path is
sent as an object that, on being read there, first prepares the child.
"""

from __future__ import annotations

import io
import os
import sys
import types
from multiprocessing import spawn
from typing import Any

from tensorflow1_compat import journal
from tensorflow1_compat.source import compile_source, prepare_namespace
from tensorflow1_compat.tree import SourceTree

__all__ = ["follow", "run_file"]


def follow(tree: SourceTree, era: int) -> None:
    """Lets spawned children be prepared for the same tree and era."""
    ask = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        data = ask(name)
        path = data.get("init_main_from_path")
        if path is not None:
            data["init_main_from_path"] = _MainPath(path, tree, era)
        return data

    spawn.get_preparation_data = get_preparation_data


def run_file(path: str, namespace: dict[str, Any]) -> None:
    """Executes a file of the user's in a namespace, as `python path` does."""
    with io.open_code(path) as file:
        code = compile_source(file.read(), path)
    prepare_namespace(namespace)
    exec(code, namespace)


class _MainPath(str):
    def __new__(cls, path: str, tree: SourceTree, era: int) -> _MainPath:
        self = super().__new__(cls, path)
        self.tree, self.era = tree, era
        return self

    def __reduce__(self) -> Any:
        return _prepare_child, (str(self), self.tree.roots, self.tree.known_paths, self.era, list(sys.path))


def _prepare_child(path: str, roots: list[str], known_paths: list[str], era: int, search_path: list[str]) -> str:
    """Runs in the child when it reads what its parent has sent, before it loads the script."""
    from tensorflow1_compat.start import enter

    sys.path[:] = search_path
    journal.silence()  # the parent has said it
    enter(roots, known_paths, era)
    spawn._fixup_main_from_path = _load_main
    return path


def _load_main(path: str) -> None:
    """As the function it replaces, but with the script compiled as in the parent."""
    current = sys.modules["__main__"]
    if getattr(current, "__file__", None) == path:
        return
    spawn.old_main_modules.append(current)
    main = types.ModuleType("__mp_main__")
    main.__file__ = os.path.abspath(path)
    main.__dict__["__builtins__"] = __builtins__
    run_file(path, main.__dict__)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
