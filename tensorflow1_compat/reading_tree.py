"""Finds the modules of a script's own tree without running them, and reads each file once."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator, Sequence

from npu_bridge.base.machine import own_packages
from npu_bridge.base.reading import open_file
from npu_bridge.base.search import search
from tensorflow1_compat.reading import FileFacts, read_file

# Further files are not read: a script's own tree is smaller, and the answer is known long before.
_MOST_FILES = 400
_MOST_NESTED = 20  # files that are read to read another one; each needs many frames of Python
_OWN_PACKAGES = frozenset(map(os.path.basename, own_packages()))


def read_tree(script: str, roots: Sequence[str]) -> Iterator[FileFacts]:
    """Yields the facts of the script, then those of every module of its tree that it imports, also indirectly.

    Args:
      script: the script's path.
      roots: folders to search for modules, the script's first; the folders of `added_by` come last.
    """
    tree = _Tree([*roots, *added_by(script)])
    start = os.path.abspath(script)
    tree.known[os.path.realpath(start)] = start
    for path in itertools.islice(search([start], tree.imported_by), _MOST_FILES):
        yield tree.read(path)


def added_by(script: str) -> list[str]:
    """Returns further folders of modules for a script that changes `sys.path`: the parent and the current folder."""
    with open_file(script, errors="replace") as file:
        if "sys.path" not in file.read():
            return []
    return [os.path.dirname(os.path.dirname(os.path.realpath(script))), os.getcwd()]


class _Tree:
    """The files of a script's tree, each read once."""

    def __init__(self, roots: Sequence[str]):
        self.known: dict[str, str] = {}  # a file with several names is read under the first one
        self._roots = roots
        self._facts: dict[str, FileFacts] = {}
        self._being_read: set[str] = set()

    def read(self, path: str) -> FileFacts:
        if path not in self._facts:
            self._being_read.add(path)
            self._facts[path] = read_file(path, functools.partial(self._bound_by, path))
            self._being_read.discard(path)
        return self._facts[path]

    def imported_by(self, path: str) -> Iterator[str]:
        facts = self.read(path)
        for name, level in (*facts.modules, *((text, 0) for text in facts.texts)):
            yield from self._files(path, name, level)

    def _files(self, path: str, name: str, level: int) -> list[str]:
        folder = path
        for _ in range(level):
            folder = os.path.dirname(folder)
        if not level and name.partition(".")[0] in _OWN_PACKAGES:
            return []  # for example if the current folder is this project's
        found = _files_of(name, [folder] if level else self._roots)
        return [self.known.setdefault(os.path.realpath(file), file) for file in found]

    def _bound_by(self, path: str, name: str, level: int) -> dict[str, str] | None:
        files = self._files(path, name, level)
        if not files:
            return None
        file = files[-1]
        is_left_out = file in self._being_read or len(self._being_read) >= _MOST_NESTED
        return {} if is_left_out or len(self._facts) >= _MOST_FILES else self.read(file).aliases


def _files_of(name: str, folders: Sequence[str]) -> list[str]:
    """Returns the files that are loaded for a dotted name, if one of the folders has them."""
    for folder in folders:
        found, at = [], folder
        for part in name.split(".") if name else ():
            at = os.path.join(at, part)
            init = os.path.join(at, "__init__.py")
            if os.path.isfile(init):
                found.append(init)
            elif os.path.isfile(at + ".py"):
                found.append(at + ".py")
            elif not os.path.isdir(at):
                break
        if found:
            return found
    return []
