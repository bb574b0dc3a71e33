#!/usr/bin/env python3
"""Counts public training scripts that find every name they use from TensorFlow, Keras and this project.

    git clone https://github.com/Ascend/ModelZoo-TensorFlow
    python tools/survey_names.py ModelZoo-TensorFlow

Reads every Python file of a checkout or a bare mirror that imports TensorFlow, Keras, `npu_bridge` or `npu_device`,
without running it, and looks up each imported module and each dotted name as a script started with `npu-run` would. A
file counts if all of its names are found, either as a TensorFlow 1 script or as a TensorFlow 2 script. Optional names
(`try: ... except ImportError`) do not count against it, nor do names of its own tree. Files that Python 3 cannot read
are listed separately.
"""

from __future__ import annotations

import argparse
import ast
import collections
import importlib
import inspect
import json
import pathlib
import subprocess
import sys
import warnings
from collections.abc import Iterable, Iterator

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
ROOTS = ("tensorflow", "keras", "npu_bridge", "npu_device", "tf_slim", "hccl")
FORGIVING = {"ImportError", "ModuleNotFoundError", "AttributeError", "Exception", "BaseException"}


def python_files(place: pathlib.Path, commit: str) -> Iterator[tuple[str, bytes]]:
    """Yields (path, content) of every Python file of a Git repository's commit, or of a plain folder."""
    if (place / "HEAD").exists() or (place / ".git").exists():
        yield from committed_files(place, commit)
        return
    for path in sorted(place.rglob("*.py")):
        yield str(path.relative_to(place)), path.read_bytes()


def committed_files(place: pathlib.Path, commit: str) -> Iterator[tuple[str, bytes]]:
    git = ["git", "-C", str(place)]
    tree = subprocess.run([*git, "ls-tree", "-r", "-z", commit], check=True, stdout=subprocess.PIPE).stdout
    found = []
    for entry in tree.decode(errors="replace").split("\0"):
        about, _, path = entry.partition("\t")
        if path.endswith(".py") and " blob " in about:
            found.append((path, about.split()[2]))
    wanted = "".join(f"{blob}\n" for _, blob in found).encode()
    contents = subprocess.run([*git, "cat-file", "--batch"], input=wanted, check=True, stdout=subprocess.PIPE).stdout
    start = 0
    for path, _ in found:
        end_of_line = contents.index(b"\n", start)
        header = contents[start:end_of_line].split()
        size = int(header[2]) if header[-1] != b"missing" else 0
        yield path, contents[end_of_line + 1 : end_of_line + 1 + size]
        start = end_of_line + 1 + size + (header[-1] != b"missing")


class Names(ast.NodeVisitor):
    """The modules and dotted names under `ROOTS` that one file uses.

    A name is followed through imports and plain assignments (`slim = tf.contrib.slim`), scope by scope: an argument
    called `layers` hides an import of that name.

    Attributes:
      found: dotted name -> first line.
    """

    def __init__(self) -> None:
        self.found: dict[str, int] = {}
        self._scopes: list[dict[str, str | None]] = [{}]
        self._forgiven = 0

    def _record_name(self, name: str, line: int) -> None:
        if not self._forgiven and name.split(".")[0] in ROOTS:
            self.found.setdefault(name, line)

    def _bind(self, target: ast.AST, dotted: str | None) -> None:
        for node in ast.walk(target):
            if isinstance(node, ast.Name):
                self._scopes[-1][node.id] = dotted if node is target else None

    def _dotted(self, node: ast.AST) -> str | None:
        attributes: list[str] = []
        while isinstance(node, ast.Attribute):
            attributes.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return None
        for scope in reversed(self._scopes):
            if node.id in scope:
                start = scope[node.id]
                return start and ".".join([start, *reversed(attributes)])
        return None

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._record_name(alias.name, node.lineno)
            name = alias.asname or alias.name.split(".")[0]
            self._scopes[-1][name] = alias.name if alias.asname else name

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level or not node.module:
            return
        for alias in node.names:
            if alias.name == "*":
                self._record_name(node.module, node.lineno)
                if node.module == "npu_bridge.npu_init":
                    self._scopes[-1].setdefault("tf", "tensorflow")
                continue
            self._record_name(f"{node.module}.{alias.name}", node.lineno)
            self._scopes[-1][alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def visit_Try(self, node: ast.Try) -> None:
        caught = {
            name.id
            for handler in node.handlers
            for name in ast.walk(handler.type or ast.Name("Exception"))
            if isinstance(name, ast.Name)
        }
        forgiving = bool(caught & FORGIVING)
        self._forgiven += forgiving
        for statement in node.body:
            self.visit(statement)
        for handler in node.handlers:
            self.visit(handler)
        self._forgiven -= forgiving
        for statement in (*node.orelse, *node.finalbody):
            self.visit(statement)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            if isinstance(target, ast.Name):
                self._bind(target, self._dotted(node.value))
            else:
                self.visit(target)
                if isinstance(target, (ast.Tuple, ast.List)):
                    self._bind(target, None)

    def visit_For(self, node: ast.For) -> None:
        self._bind_plain(node.target)
        self.generic_visit(node)

    def _bind_plain(self, target: ast.AST) -> None:
        if isinstance(target, (ast.Name, ast.Tuple, ast.List)):
            self._bind(target, None)

    def visit_withitem(self, node: ast.withitem) -> None:
        self.visit(node.context_expr)
        if node.optional_vars is not None:
            self._bind_plain(node.optional_vars)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        if not isinstance(node, ast.Lambda):
            for outer in (*node.decorator_list, node.returns):
                if outer is not None:
                    self.visit(outer)
            self._scopes[-1][node.name] = None
        arguments = node.args
        for default in (*arguments.defaults, *(value for value in arguments.kw_defaults if value is not None)):
            self.visit(default)
        every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg)
        self._scopes.append({argument.arg: None for argument in every if argument is not None})
        for statement in node.body if isinstance(node.body, list) else [node.body]:
            self.visit(statement)
        self._scopes.pop()

    visit_AsyncFunctionDef = visit_FunctionDef
    visit_Lambda = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for outer in (*node.bases, *node.decorator_list):
            self.visit(outer)
        self._scopes[-1][node.name] = None
        self._scopes.append({})
        for statement in node.body:
            self.visit(statement)
        self._scopes.pop()

    def _visit_comprehension(self, node: ast.AST) -> None:
        self._scopes.append({})
        for generator in node.generators:
            self._bind_plain(generator.target)
        self.generic_visit(node)
        self._scopes.pop()

    visit_ListComp = visit_SetComp = visit_GeneratorExp = visit_DictComp = _visit_comprehension

    def visit_Attribute(self, node: ast.Attribute) -> None:
        dotted = self._dotted(node) if isinstance(node.ctx, ast.Load) else None
        if dotted:
            self._record_name(dotted, node.lineno)
        else:
            self.visit(node.value)


def read(source: bytes) -> dict[str, int] | None:
    """Returns the names that one file uses, or None if Python 3 cannot read it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return None
    names = Names()
    names.visit(tree)
    return names.found


def survey(place: pathlib.Path, commit: str) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Returns a dict from file to its names (name -> first line), and the files that Python 3 cannot read."""
    files: dict[str, dict[str, int]] = {}
    unreadable = []
    own = set()  # if the tree has its own package under one of the names
    for path, source in python_files(place, commit):
        for end in ("/__init__.py", ".py"):
            if path.endswith(tuple(f"{root}{end}" for root in ROOTS)):
                own.add(path[: -len(end)])
        if not any(root.encode() in source for root in ROOTS):
            continue
        names = read(source)
        if names is None:
            unreadable.append(path)
        elif names:
            files[path] = names
    for path, names in files.items():
        above = [str(folder) for folder in pathlib.PurePosixPath(path).parents]
        local = {root for root in ROOTS for folder in above if f"{folder}/{root}".lstrip("./") in own}
        files[path] = {name: line for name, line in names.items() if name.split(".")[0] not in local}
    return files, unreadable


class NameLookup:
    """The look-up of names as a script of TensorFlow 1 or 2 does it; looks up each name once."""

    def __init__(self, era: int) -> None:
        sys.path.insert(0, str(REPOSITORY))
        from tensorflow1_compat import proxies, tables, tables_of_2

        proxies.serve_proxies(None, tables.OF_1 if era == 1 else tables_of_2.OF_2)
        self._proxies = proxies
        self._known: dict[str, bool] = {}

    def missing(self, names: Iterable[str]) -> list[str]:
        """Returns the names of a file that are not found."""
        return [name for name in names if not self.finds(name)]

    def finds(self, name: str) -> bool:
        """Returns whether a dotted name is found."""
        if name not in self._known:
            self._known[name] = self._look_up(name)
        return self._known[name]

    def _module(self, name: str):
        return importlib.import_module(name) if self._proxies.is_plain(name) else self._proxies.proxy(name)

    def _look_up(self, name: str) -> bool:
        parts = name.split(".")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                at = self._module(parts[0])
            except Exception:
                return False
            for length, part in enumerate(parts[1:], 2):
                if not (inspect.ismodule(at) or inspect.isclass(at)):
                    return True
                try:
                    at = getattr(at, part)
                except Exception:
                    if not inspect.ismodule(at):
                        return False
                    try:
                        at = self._module(".".join(parts[:length]))
                    except Exception:
                        return False
        return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("place", type=pathlib.Path, help="a checkout, a bare mirror, or any folder")
    parser.add_argument("--commit", default="HEAD", help="of a Git repository (default: %(default)s)")
    parser.add_argument("--top", type=int, default=40, help="number of missing names to list (default: %(default)s)")
    parser.add_argument("--json", type=pathlib.Path, help="file for the missing names of each file")
    arguments = parser.parse_args()

    files, unreadable = survey(arguments.place, arguments.commit)
    lookup = NameLookup(era=1)
    missing = {path: names for path in files if (names := lookup.missing(files[path]))}
    lookup = NameLookup(era=2)  # a file counts under the version that misses fewer of its names
    missing = {path: min(names, lookup.missing(files[path]), key=len) for path, names in missing.items()}
    missing = {path: names for path, names in missing.items() if names}
    print(f"{len(files)} files, {len(unreadable)} more that Python 3 cannot read")
    for title, chosen in (("all files", list(files)), ("files that train", [p for p in files if trains(files[p])])):
        found = sum(path not in missing for path in chosen)
        print(f"{title}: {found} of {len(chosen)} find all of their names ({100 * found / max(1, len(chosen)):.2f} %)")
    counts = collections.Counter(name for names in missing.values() for name in names)
    for name, count in counts.most_common(arguments.top):
        print(f"{count:6}  {name}")
    if arguments.json:
        arguments.json.write_text(json.dumps(missing, indent=1, sort_keys=True))
    return 0


def trains(names: dict[str, int]) -> bool:
    """Returns whether a file makes an optimizer, an estimator or its own training loop."""
    return any(word in name for name in names for word in ("Optimizer", "optimizers.", ".gradients", "Estimator"))


if __name__ == "__main__":
    sys.exit(main())
