"""Compiles the user's files so that their imports of TensorFlow and a few other packages go through `imports.py`.

Five things are replaced: import statements, removed methods, old modes of `open`, lists as indices, and (from numpy 2.4
on) arguments of `float`, `int` and `%` (`calls.py`). The replacements keep line and column, so tracebacks, debuggers
and profilers show the file unchanged. A file without any of these is compiled as usual.
"""

from __future__ import annotations

import ast
import functools
import importlib._bootstrap
import importlib.machinery
import re
import types
from typing import Any

from tensorflow1_compat.old_python.calls import OLD_METHODS, OLD_MODES, find_old_mode, numpy_version
from tensorflow1_compat.proxies import MENTIONS, ROOTS

__all__ = ["ENTRANCE", "UserLoader", "compile_source", "prepare_namespace"]

# The name under which a module's imports find `imports.py`. The underscores at its end prevent mangling in classes;
# it is a module so that functions can be pickled with their globals.
ENTRANCE = "__tf1__"
_compile = functools.partial(importlib._bootstrap._call_with_frames_removed, compile)
_WORD = re.compile(r"\w+")
_NUMBER_TYPES = frozenset({"complex", "float", "int"})
_REFUSES_ARRAYS_SINCE = (2, 4)  # since this version of numpy, `float` refuses arrays with an axis
_NEW_PROTO_CODE = """
from google.protobuf.internal import builder as _builder
_builder.BuildMessageAndEnumDescriptors(DESCRIPTOR, globals())
_builder.BuildTopDescriptorsAndMessages(DESCRIPTOR, __name__, globals())
"""


def compile_source(source: bytes, path: str, optimize: int = -1) -> types.CodeType:
    """Compiles a file of the user's tree.

    Args:
      source: bytes of the file, in the encoding that it declares.
      path: the path that tracebacks show.
      optimize: see `compile` of Python.
    Raises:
      SyntaxError: the file is not valid Python.
    """
    if path.endswith("_pb2.py") and b"descriptor.FileDescriptor(" in source:  # from an old protoc
        tree = _compile(source, path, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
        return _compile(_rewrite_old_proto(tree), path, "exec", dont_inherit=True, optimize=optimize)
    words = set(_WORD.findall(source.decode("latin-1")))
    roots = {root for root in ROOTS & words if root not in MENTIONS or MENTIONS[root] & words}
    is_compiled = "numba" in words  # functions compiled by numba cannot call functions of this package
    methods = OLD_METHODS & words if not is_compiled else frozenset()
    has_numbers = not is_compiled and (b"%" in source or not _NUMBER_TYPES.isdisjoint(words))
    has_numbers = has_numbers and numpy_version() >= _REFUSES_ARRAYS_SINCE
    if roots or methods or has_numbers or "__import__" in words or OLD_MODES & words:
        tree = _compile(source, path, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
        try:
            tree = _ImportRedirector(roots, methods, has_numbers, not is_compiled).visit(tree)
            return _compile(tree, path, "exec", dont_inherit=True, optimize=optimize)
        except RecursionError:  # an expression too deep for a tree, in a file of data
            pass
    return _compile(source, path, "exec", dont_inherit=True, optimize=optimize)


def prepare_namespace(namespace: dict[str, Any]) -> None:
    """Adds to a module's namespace the name `ENTRANCE`, through which its compiled imports call `imports.py`."""
    from tensorflow1_compat import imports

    namespace[ENTRANCE] = imports


class UserLoader(importlib.machinery.SourceFileLoader):
    """A loader of modules of the user's tree; it ignores `__pycache__`, which holds code without the replacements."""

    def get_code(self, fullname: str) -> types.CodeType:
        path = self.get_filename(fullname)
        return compile_source(self.get_data(path), path)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        prepare_namespace(module.__dict__)
        return module


def _rewrite_old_proto(tree: ast.Module) -> ast.Module:
    """Updates a module that an old protoc has generated: replaces all code after the file's descriptor.

    The new code is what newer protoc versions generate. Protobuf 4 refuses the descriptors that the old code creates.
    """
    for number, statement in enumerate(tree.body):
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "DESCRIPTOR":
            tree.body[number + 1 :] = ast.parse(_NEW_PROTO_CODE).body
            break
    return tree


def _hide_from_tracebacks(*functions: Any) -> None:
    """Makes tracebacks of syntax errors omit frames of these functions, as they omit frames of Python's own loader.

    CPython recognises frames of its import system by their file name. So these functions get the same file name.
    """
    for function in functions:
        function.__code__ = function.__code__.replace(co_filename="<frozen importlib._bootstrap_external>")


class _ImportRedirector(ast.NodeTransformer):
    """A transformer that replaces imports of redirected modules by assignments of call results, at the same place."""

    def __init__(self, roots: set[str], methods: frozenset[str], has_numbers: bool, has_lists: bool):
        self._roots = roots
        self._methods = methods
        self._has_numbers = has_numbers
        self._has_lists = has_lists
        self._names_of_lists: set[str] = set()

    def visit_Import(self, node: ast.Import) -> Any:
        if not any(_root_module_name(alias.name) in self._roots for alias in node.names):
            return node
        return [self._redirect_alias(alias, node) for alias in node.names]

    def _redirect_alias(self, alias: ast.alias, node: ast.Import) -> ast.stmt:
        if _root_module_name(alias.name) not in self._roots:
            return ast.copy_location(ast.Import(names=[alias]), node)
        function = "load" if alias.asname else "load_root"
        target = ast.Name(id=alias.asname or _root_module_name(alias.name), ctx=ast.Store())
        return _place_like(ast.Assign(targets=[target], value=_make_call(function, ast.Constant(alias.name))), node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        if node.level or _root_module_name(node.module) not in self._roots:
            return node
        names = [alias.name for alias in node.names]
        if names == ["*"]:
            return _place_like(ast.Expr(_make_call("import_all_names", ast.Constant(node.module))), node)
        call = _make_call("import_names", ast.Constant(node.module), *map(ast.Constant, names))
        targets = [ast.Name(id=alias.asname or alias.name, ctx=ast.Store()) for alias in node.names]
        return _place_like(ast.Assign(targets=[ast.Tuple(elts=targets, ctx=ast.Store())], value=call), node)

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        self.generic_visit(node)
        if node.attr in self._methods and isinstance(node.ctx, ast.Load):
            node.value = _wrap_in_call("with_old_method", node.value, ast.Constant(node.attr))
        return node

    def visit_Call(self, node: ast.Call) -> Any:
        mode = find_old_mode(node)
        if mode is not None:
            mode.value = mode.value.replace("U", "") or "r"
        self.generic_visit(node)
        is_number = self._has_numbers and isinstance(node.func, ast.Name) and node.func.id in _NUMBER_TYPES
        if is_number and len(node.args) == 1 and not node.keywords and _may_be_array(node.args[0]):
            node.args = [_wrap_in_call("element_or_value", node.args[0])]
        return node

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        self.generic_visit(node)
        is_text = isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)
        if self._has_numbers and isinstance(node.op, ast.Mod) and is_text and _may_be_array(node.right):
            node.right = _wrap_in_call("without_one_element_arrays", node.right, ast.Constant(node.left.value))
        return node

    def visit_Assign(self, node: ast.Assign) -> Any:
        if _is_list(node.value):
            self._names_of_lists.update(target.id for target in node.targets if isinstance(target, ast.Name))
        return self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        is_list = _is_list(node.slice) or isinstance(node.slice, ast.Name) and node.slice.id in self._names_of_lists
        self.generic_visit(node)
        if self._has_lists and is_list:
            node.value = _wrap_in_call("with_old_index", node.value)
        return node

    def visit_Name(self, node: ast.Name) -> Any:
        if node.id == "__import__" and isinstance(node.ctx, ast.Load):
            return _place_like(_make_node_of_import_function("import_by_call"), node)
        return node


_hide_from_tracebacks(compile_source, UserLoader.get_code)


def _is_list(node: ast.expr) -> bool:
    """Returns whether an expression makes a list that can have other elements than plain numbers."""
    if isinstance(node, ast.BinOp):
        return _is_list(node.left) or _is_list(node.right)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "list"
    if isinstance(node, ast.List):
        plain = [isinstance(each, ast.Constant) and isinstance(each.value, (int, str)) for each in node.elts]
        return not plain or not all(plain)  # an empty list can be filled later
    return isinstance(node, ast.ListComp)


def _may_be_array(node: ast.expr) -> bool:
    return not isinstance(node, (ast.Constant, ast.JoinedStr, ast.Starred))


def _wrap_in_call(function: str, node: ast.expr, *more: ast.expr) -> ast.expr:
    """Wraps an expression of the file in a call; the call gets the line and column of the expression."""
    return ast.fix_missing_locations(ast.copy_location(_make_call(function, node, *more), node))


def _root_module_name(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _make_node_of_import_function(function: str) -> ast.Attribute:
    return ast.Attribute(value=ast.Name(id=ENTRANCE, ctx=ast.Load()), attr=function, ctx=ast.Load())


def _make_call(function: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(func=_make_node_of_import_function(function), args=list(arguments), keywords=[])


def _place_like(new_node: Any, old_node: ast.AST) -> Any:
    """Gives a new node and all nodes below it the place of an old node."""
    for node in ast.walk(new_node):
        ast.copy_location(node, old_node)
    return new_node
