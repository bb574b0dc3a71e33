"""Compiling the user's files so that their imports of TensorFlow and of a few others go through `imports.py`.

Only import statements are replaced, at their own lines and columns; what is run, shown in tracebacks, stepped through
and profiled is the file as it is. A file without such imports is compiled as ever.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import re
import types
from typing import Any

from npu_bridge.tf1.faces import ROOTS

__all__ = ["ENTRANCE", "UserLoader", "compile_source", "prepare_namespace"]

# The name under which a module's imports find `imports.py`. The underscores behind it keep Python from mangling it in
# classes; a module is what it is so that functions can be pickled together with their globals.
ENTRANCE = "__tf1__"
_WORTH_A_LOOK = re.compile(b"|".join(root.encode() for root in sorted({*ROOTS, "__import__"})))


def compile_source(source: bytes, path: str, optimize: int = -1) -> types.CodeType:
    """Code of a file of the user's tree.

    Args:
      source: its bytes, in the encoding that it declares.
      path: as tracebacks shall show it.
      optimize: as for `compile`.
    Raises:
      SyntaxError: as from `compile`.
    """
    if _WORTH_A_LOOK.search(source):
        tree = compile(source, path, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
        try:
            return compile(_Redirected().visit(tree), path, "exec", dont_inherit=True, optimize=optimize)
        except RecursionError:  # an expression too deep for a tree, in a file of data
            pass
    return compile(source, path, "exec", dont_inherit=True, optimize=optimize)


def prepare_namespace(namespace: dict[str, Any]) -> None:
    """Gives a module what its compiled imports look for."""
    from npu_bridge.tf1 import imports

    namespace[ENTRANCE] = imports


class UserLoader(importlib.machinery.SourceFileLoader):
    """Loads a module of the user's tree. It neither reads nor writes `__pycache__`, which holds the plain code."""

    def get_code(self, fullname: str) -> types.CodeType:
        path = self.get_filename(fullname)
        return compile_source(self.get_data(path), path)

    def exec_module(self, module: types.ModuleType) -> None:
        prepare_namespace(module.__dict__)
        super().exec_module(module)


class _Redirected(ast.NodeTransformer):
    """Import statements of redirected modules become assignments from calls, at the same place in the file."""

    def visit_Import(self, node: ast.Import) -> Any:
        if not any(_root(alias.name) in ROOTS for alias in node.names):
            return node
        return [self._of_alias(alias, node) for alias in node.names]

    def _of_alias(self, alias: ast.alias, node: ast.Import) -> ast.stmt:
        if _root(alias.name) not in ROOTS:
            return ast.copy_location(ast.Import(names=[alias]), node)
        function = "load" if alias.asname else "load_root"
        target = ast.Name(id=alias.asname or _root(alias.name), ctx=ast.Store())
        return _placed(ast.Assign(targets=[target], value=_call(function, ast.Constant(alias.name))), node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        if node.level or _root(node.module) not in ROOTS:
            return node
        names = [alias.name for alias in node.names]
        if names == ["*"]:
            return _placed(ast.Expr(_call("take_all", ast.Constant(node.module))), node)
        call = _call("take", ast.Constant(node.module), *map(ast.Constant, names))
        targets = [ast.Name(id=alias.asname or alias.name, ctx=ast.Store()) for alias in node.names]
        return _placed(ast.Assign(targets=[ast.Tuple(elts=targets, ctx=ast.Store())], value=call), node)

    def visit_Name(self, node: ast.Name) -> Any:
        if node.id == "__import__" and isinstance(node.ctx, ast.Load):
            return _placed(_entrance("import_by_call"), node)
        return node


def _root(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _entrance(function: str) -> ast.Attribute:
    return ast.Attribute(value=ast.Name(id=ENTRANCE, ctx=ast.Load()), attr=function, ctx=ast.Load())


def _call(function: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(func=_entrance(function), args=list(arguments), keywords=[])


def _placed(new: Any, old: ast.AST) -> Any:
    """Puts a node and all below it where the old one was."""
    for node in ast.walk(new):
        ast.copy_location(node, old)
    return new
