"""Reading a script and the modules of its tree without running them: what they import, and which names they use."""

from __future__ import annotations

import ast
import itertools
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from npu_bridge.base.reading import open_file
from npu_bridge.base.search import search
from tensorflow1_compat.journal import Place

__all__ = ["FileFacts", "Use", "read_file", "read_tree"]

# Files beyond are not read: a script's own tree is smaller, and the answer is known long before.
_MOST_FILES = 400

# Classes of `npu_bridge.npu_init` whose keywords are options.
TAKE_OPTIONS = (
    "NPURunConfig",
    "DumpConfig",
    "ProfilingConfig",
    "MemoryConfig",
    "DynamicInputConfig",
    "ExperimentalConfig",
)


class Use(NamedTuple):
    """A module or a dotted name in a file.

    Attributes:
      name: with aliases resolved: `tensorflow.contrib.layers.batch_norm`.
      place: where it is used.
      is_import: it is imported rather than looked up.
      is_guarded: it is inside a `try` that has handlers, so it may be missing.
      is_call: it is called right there.
      keywords: of the call.
      alias: what the first word of it stands for.
    """

    name: str
    place: Place
    is_import: bool
    is_guarded: bool
    is_call: bool = False
    keywords: tuple[str, ...] = ()
    alias: str = ""


class FileFacts(NamedTuple):
    """What a file says about itself.

    Attributes:
      path: of the file.
      uses: in the order of the file.
      modules: (name, level) of all that it imports, `from a import b` also as `a.b`.
      error: why it cannot be compiled, or None.
    """

    path: str
    uses: list[Use]
    modules: list[tuple[str, int]]
    error: SyntaxError | None = None


def read_file(path: str) -> FileFacts:
    """Reads one file; a file that is no Python 3 has an `error` and nothing else.

    Raises:
      OSError: it cannot be read, or is not a regular file.
    """
    with open_file(path, "rb") as file:
        source = file.read()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in strings; the compiler says them when the file is run
            tree = ast.parse(source, path)
    except (SyntaxError, ValueError, RecursionError) as error:
        problem = error if isinstance(error, SyntaxError) else SyntaxError(str(error), (path, 1, 0, ""))
        return FileFacts(path, [], [], problem)
    reader = _Reader(path)
    reader.visit(tree)
    return FileFacts(path, reader.uses, reader.modules)


def read_tree(script: str, roots: Sequence[str]) -> Iterator[FileFacts]:
    """The script's facts, and then those of every module of its tree that it imports, directly or not.

    Args:
      script: the script's path.
      roots: folders in which modules are looked for, that of the script first.
    """
    start = os.path.abspath(script)
    read: dict[str, FileFacts] = {}
    known = {os.path.realpath(start): start}  # a file that has several names is read under the first one

    def imported(path):
        for name, level in read[path].modules:
            folder = path
            for _ in range(level):
                folder = os.path.dirname(folder)
            for file in _files_of(name, [folder] if level else roots):
                yield known.setdefault(os.path.realpath(file), file)

    for path in itertools.islice(search([start], imported), _MOST_FILES):
        read[path] = read_file(path)
        yield read[path]


def _files_of(name: str, folders: Sequence[str]) -> list[str]:
    """The files that are loaded for a dotted name, where one of the folders has them."""
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


class _Reader(ast.NodeVisitor):
    def __init__(self, path: str):
        self.uses: list[Use] = []
        self.modules: list[tuple[str, int]] = []
        self._path = path
        self._aliases: dict[str, str] = {}
        self._guards = 0
        self._call: ast.Call | None = None

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.modules.append((alias.name, 0))
            self._aliases[alias.asname or alias.name.partition(".")[0]] = (
                alias.name if alias.asname else alias.name.partition(".")[0]
            )
            self._use(alias.name, node, is_import=True)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        self.modules.append((module, node.level))
        for alias in node.names:
            full = f"{module}.{alias.name}".strip(".")
            self.modules.append((full, node.level))
            if node.level:
                continue
            if alias.name == "*":
                if module == "npu_bridge.npu_init":
                    self._aliases.update({name: f"{module}.{name}" for name in ("tf", *TAKE_OPTIONS)})
                self._use(module, node, is_import=True)
            else:
                self._aliases[alias.asname or alias.name] = full
                self._use(full, node, is_import=True)

    def visit_Try(self, node: ast.Try) -> None:
        self._guards += bool(node.handlers)
        for statement in node.body:
            self.visit(statement)
        self._guards -= bool(node.handlers)
        for part in (*node.handlers, *node.orelse, *node.finalbody):
            # What a handler does instead counts as little as what it stands in for.
            self._guards += isinstance(part, ast.ExceptHandler)
            self.visit(part)
            self._guards -= isinstance(part, ast.ExceptHandler)

    def visit_Assign(self, node: ast.Assign) -> None:
        """`flags = tf.flags` gives another alias."""
        name = self._dotted(node.value)
        if name and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            self._aliases[node.targets[0].id] = name
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        self._call = node
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self._dotted(node)
        if name is None:
            self.generic_visit(node)
            return
        first = node.value
        while isinstance(first, ast.Attribute):
            first = first.value
        self._use_at(name, node, self._aliases[first.id])

    def visit_Name(self, node: ast.Name) -> None:
        known = self._aliases.get(node.id, "")
        if "." in known:
            self._use_at(known, node, known)

    def _use_at(self, name: str, node: ast.expr, alias: str) -> None:
        call = self._call if self._call is not None and self._call.func is node else None
        keywords = tuple(keyword.arg for keyword in call.keywords if keyword.arg) if call else ()
        self._use(name, node, is_call=call is not None, keywords=keywords, alias=alias)

    def _dotted(self, node: ast.expr) -> str | None:
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self._aliases:
            return None
        return ".".join([self._aliases[node.id], *reversed(parts)])

    def _use(self, name: str, node: ast.AST, is_import: bool = False, **more: object) -> None:
        self.uses.append(Use(name, Place(self._path, node.lineno), is_import, self._guards > 0, **more))
