"""Parses files of the repository, each once in a process; cases that ask share a worker."""

from __future__ import annotations

import ast
import functools
import pathlib


@functools.cache
def tree_of(path: pathlib.Path) -> ast.Module:
    """Returns the syntax tree of a file; callers must not change it."""
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def nodes_of(path: pathlib.Path) -> list[ast.AST]:
    """Returns all nodes of the tree, in the order of `ast.walk`."""
    return list(ast.walk(tree_of(path)))
