"""Finds the functions of a script that its code can reach; problems in other functions are harmless."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from npu_bridge.base.search import search

__all__ = ["FileDefinitions", "find_names_tested_for_existence", "definitions_in", "find_reached_names"]

# Functions that look up a name -> the position of that argument. A computed name can be any name.
_BY_NAME = {"getattr": 1, "globals": 0, "eval": 0, "exec": 0, "import_module": 0, "__import__": 0, "attrgetter": 0}
_ANYTHING = "*"


class FileDefinitions(NamedTuple):
    """The top-level definitions of a file, and the names that their code mentions.

    Attributes:
      at_top: names mentioned outside of functions and classes, and names of decorated functions and classes.
      in_main: names mentioned under `if __name__ == "__main__"`, which imports skip.
      inside: name of a function or class -> names mentioned inside.
      lines: name of a function or class -> first and last line.
    """

    at_top: frozenset[str] = frozenset()
    in_main: frozenset[str] = frozenset()
    inside: dict[str, frozenset[str]] = {}
    lines: dict[str, tuple[int, int]] = {}

    def find_enclosing_definition(self, line: int) -> str | None:
        """Returns the name of the function or class that contains a line; None at the top level."""
        return next((name for name, (first, last) in self.lines.items() if first <= line <= last), None)


def definitions_in(tree: ast.Module) -> FileDefinitions:
    """Returns the top-level definitions in a syntax tree."""
    at_top: set[str] = set()
    in_main: set[str] = set()
    inside: dict[str, frozenset[str]] = {}
    lines: dict[str, tuple[int, int]] = {}
    for node in tree.body:
        mentioned = frozenset(_names_mentioned_in(node))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name not in inside:
            inside[node.name], lines[node.name] = mentioned, (node.lineno, node.end_lineno or node.lineno)
            at_top |= {node.name} if node.decorator_list else set()
        elif isinstance(node, ast.If) and "__name__" in mentioned and "__main__" in mentioned:
            in_main |= mentioned
        else:
            at_top |= mentioned
    return FileDefinitions(frozenset(at_top), frozenset(in_main), inside, lines)


def find_reached_names(files: Sequence[FileDefinitions]) -> frozenset[str] | None:
    """Returns the names that reachable code mentions; None if this code computes names, so any name is possible."""

    def names_mentioned_by(name: str) -> Iterator[str]:
        for each in files:
            yield from each.inside.get(name, ())

    begin = files[0].in_main.union(*(each.at_top for each in files))
    reached = frozenset(search(begin, names_mentioned_by))
    return None if _ANYTHING in reached else reached


def find_names_tested_for_existence(test: ast.expr) -> Iterator[str]:
    """Yields the names whose existence a condition tests by `hasattr(tf, "name")` or `"name" in dir(tf)`."""
    for node in ast.walk(test):
        asked: ast.expr | None = None
        if isinstance(node, ast.Call) and len(node.args) > 1 and _is_call_of(node, "hasattr", "getattr"):
            asked = node.args[1]
        elif isinstance(node, ast.Compare) and _is_call_of(node.comparators[0], "dir", "vars"):
            asked = node.left
        if isinstance(asked, ast.Constant) and isinstance(asked.value, str):
            yield asked.value


def _is_call_of(node: ast.expr, *names: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names


def _names_mentioned_in(part: ast.stmt) -> Iterator[str]:
    """Yields a statement's names, its attributes and the words of its texts; `_ANYTHING` for a computed name."""
    for node in ast.walk(part):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias) and node.asname:
            yield node.name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 100:
            yield from node.value.replace(".", " ").split()
        elif isinstance(node, ast.Call):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            place = _BY_NAME.get(function)
            if place is not None and not isinstance((node.args[place:] or [None])[0], ast.Constant):
                yield _ANYTHING
