"""Finds the user's modules that a script imports, without running them, and reads each file once."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator, Sequence

from npu_bridge.base.machine import project_package_folders
from npu_bridge.base.reading import open_file
from npu_bridge.base.search import search
from tensorflow1_compat.reading import FileFacts, read_file

# Further files are not read: a script's own tree is smaller, and the first files determine the era.
_MOST_FILES = 400
_MOST_NESTED = 20  # nesting of files that import each other; each level needs many frames of Python
_OWN_PACKAGES = frozenset(map(os.path.basename, project_package_folders()))


def read_tree(script: str, roots: Sequence[str]) -> Iterator[FileFacts]:
    """Yields the facts about a script, then about each of the user's modules that it imports directly or indirectly.

    Args:
      script: path of the script.
      roots: folders to search for modules, beginning with the script's folder; `likely_path_additions(script)` follow.
    """
    tree = _Tree([*roots, *likely_path_additions(script)])
    start = os.path.abspath(script)
    tree.known[os.path.realpath(start)] = start
    for path in itertools.islice(search([start], tree.list_imported_files), _MOST_FILES):
        yield tree.read(path)


def likely_path_additions(script: str) -> list[str]:
    """Returns the parent folder and the current folder if a script mentions `sys.path`; else an empty list."""
    above = os.path.dirname(os.path.dirname(os.path.realpath(script)))
    return [above, os.getcwd()] if mentions_search_path(script) else []


def mentions_search_path(path: str) -> bool:
    """Returns whether a file mentions `sys.path`, and so can change where Python finds modules."""
    with open_file(path, errors="replace") as file:
        return "sys.path" in file.read()


class _Tree:
    """A cache of the files in a script's tree, each of which is read once."""

    def __init__(self, roots: Sequence[str]):
        self.known: dict[str, str] = {}  # a file with several names is read under the first one
        self._roots = roots
        self._facts: dict[str, FileFacts] = {}
        self._being_read: set[str] = set()

    def read(self, path: str) -> FileFacts:
        if path not in self._facts:
            self._being_read.add(path)
            self._facts[path] = read_file(path, functools.partial(self._aliases_in, path))
            self._being_read.discard(path)
        return self._facts[path]

    def list_imported_files(self, path: str) -> Iterator[str]:
        facts = self.read(path)
        for name, level in (*facts.modules, *((text, 0) for text in facts.texts)):
            yield from self._files_of_import(path, name, level)

    def _files_of_import(self, path: str, name: str, level: int) -> list[str]:
        folder = path
        for _ in range(level):
            folder = os.path.dirname(folder)
        if not level and name.partition(".")[0] in _OWN_PACKAGES:
            return []  # such as modules of this project, if it is in the current folder
        found = _find_files(name, [folder] if level else self._roots)
        return [self.known.setdefault(os.path.realpath(file), file) for file in found]

    def _aliases_in(self, path: str, name: str, level: int) -> dict[str, str] | None:
        files = self._files_of_import(path, name, level)
        if not files:
            return None
        file = files[-1]
        is_left_out = file in self._being_read or len(self._being_read) >= _MOST_NESTED
        return {} if is_left_out or len(self._facts) >= _MOST_FILES else self.read(file).aliases


def _find_files(name: str, folders: Sequence[str]) -> list[str]:
    """Returns the files that an import of a dotted name loads, from the first folder with any of these files."""
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
