"""Reads the modules and names that a file uses, without running the file."""

from __future__ import annotations

import ast
import contextlib
import functools
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from npu_bridge.base.reading import open_file
from tensorflow1_compat.installed import list_exported_names
from tensorflow1_compat.journal import SourcePlace
from tensorflow1_compat.old_python.calls import OLD_METHODS, find_old_mode
from tensorflow1_compat.old_python.removed_names import OF_OLD
from tensorflow1_compat.reach import FileDefinitions, definitions_in, find_names_tested_for_existence

SET, ANY = 0, "*"
_DOTTED_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
# Used by a script that defines updates of its own Keras optimizer in the way of TensorFlow before 2.11.
METHODS_OF_LEGACY = "methods of a legacy optimizer"
_LEGACY_METHODS = {"_prepare_local", "_resource_apply_dense", "_resource_apply_sparse"}
_VERSIONS = ("__version__", "VERSION", "version_info")
_EXAMINED = ("tensorflow.", "keras.", "npu_bridge.", "npu_device")


class ScriptCall(NamedTuple):
    """The arguments of a call.

    Attributes:
      positional: number of positional arguments; None if the call contains `*rest`.
      keywords: names of the keyword arguments.
      is_open: whether the call contains `**more`, whose names are unknown.
      node: the syntax node of the call.
    """

    positional: int | None
    keywords: tuple[str, ...]
    is_open: bool
    node: ast.Call


class NameUse(NamedTuple):
    """A use of a module or a dotted name in a file.

    Attributes:
      name: the full name, with aliases resolved, such as `tensorflow.contrib.layers.batch_norm`.
      place: the file and line of the use.
      is_import: whether an import statement uses the name.
      is_guarded: whether the name can be missing, because the use is inside a `try` with handlers or after `hasattr`.
      call: the arguments, if the name is called.
      alias: the full name for which the first word in the text stands.
    """

    name: str
    place: SourcePlace
    is_import: bool
    is_guarded: bool
    call: ScriptCall | None = None
    alias: str = ""


class FileFacts(NamedTuple):
    """The facts that reading a file gives.

    Attributes:
      path: path of the file.
      uses: the uses of modules and names, in the order of the file.
      modules: (name, level) of all imports; `from a import b` also adds `a.b`.
      error: the error if the file cannot be compiled, or None.
      aliases: name in the file -> full name, for modules and for names imported from modules.
      variables: environment variable -> line that reads it, or `SET` if the file sets it. The key `ANY` means that the
        file sets variables with computed names.
      texts: string constants in the form of a module name, such as "models.resnet.train".
      definitions: functions and classes of the file, and the names that they mention.
      tree: the syntax tree.
    """

    path: str
    uses: list[NameUse]
    modules: list[tuple[str, int]]
    error: SyntaxError | None = None
    aliases: dict[str, str] = {}
    variables: dict[str, int] = {}
    texts: Sequence[str] = ()
    definitions: FileDefinitions = FileDefinitions()
    tree: ast.Module = ast.Module([], [])


def read_file(
    path: str, find_aliases: Callable[[str, int], dict[str, str] | None] = lambda module, level: None
) -> FileFacts:
    """Reads one file; the facts about a file that is not valid Python 3 contain only an `error`.

    Args:
      path: path of the file.
      find_aliases: returns the aliases in a module, given its name and the level of the import; None for modules
        outside of the user's tree.
    Raises:
      OSError: the file cannot be read, or is not a regular file.
    """
    with open_file(path, "rb") as file:
        source = file.read()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in strings; the compiler reports them when the file runs
            tree = ast.parse(source, path)
    except (SyntaxError, ValueError, RecursionError) as error:
        problem = error if isinstance(error, SyntaxError) else SyntaxError(str(error), (path, 1, 0, ""))
        return FileFacts(path, [], [], problem)
    reader = _Reader(path, tree, find_aliases)
    reader.visit(tree)
    found = (reader.uses, reader.modules, None, reader.aliases, reader.variables, reader.texts)
    return FileFacts(path, *found, definitions_in(tree), tree)


class _Reader(ast.NodeVisitor):
    def __init__(self, path: str, tree: ast.Module, aliases_in: Callable[[str, int], dict[str, str] | None]):
        self.uses: list[NameUse] = []
        self.modules: list[tuple[str, int]] = []
        self.aliases: dict[str, str] = {}
        self.variables: dict[str, int] = {}
        self.texts: list[str] = []
        self._path = path
        self._aliases_in = aliases_in
        self._tree = tree
        self._guards = 0
        self._tested: list[str] = []  # last words of names whose existence enclosing conditions test
        self._call: ast.Call | None = None
        self._base = ""  # the base of the class being read

    @functools.cached_property
    def _names_bound_in_file(self) -> set[str]:
        """The names that the file itself binds, without imports; these names do not come from a star import."""
        bound: set[str] = set()
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                bound.add(node.id)
            elif isinstance(node, ast.arg):
                bound.add(node.arg)
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                bound.add(node.name)
        return bound

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.modules.append((alias.name, 0))
            self.aliases[alias.asname or alias.name.partition(".")[0]] = (
                alias.name if alias.asname else alias.name.partition(".")[0]
            )
            self._add_use(alias.name, node, is_import=True)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        self.modules.append((module, node.level))
        bound = self._aliases_in(module, node.level)
        for alias in node.names:
            full = f"{module}.{alias.name}".strip(".")
            self.modules.append((full, node.level))
            if alias.name == "*":
                names = (_list_names_bound_by_star(module) if bound is None and not node.level else bound) or {}
                self.aliases.update(
                    (name, full)
                    for name, full in names.items()
                    if name[0] != "_" and name not in self._names_bound_in_file
                )
                if not node.level:
                    self._add_use(module, node, is_import=True)
            elif bound and alias.name in bound:  # the name has the meaning that it has in that module
                self.aliases[alias.asname or alias.name] = bound[alias.name]
                self._add_use(full, node, is_import=True)
            elif not node.level:
                self.aliases[alias.asname or alias.name] = full
                self._add_use(full, node, is_import=True)

    def visit_Try(self, node: ast.Try) -> None:
        self._guards += bool(node.handlers)
        for statement in node.body:
            self.visit(statement)
        self._guards -= bool(node.handlers)
        for part in (*node.handlers, *node.orelse, *node.finalbody):
            # A handler's code is as optional as the code that it replaces, and so are its aliases.
            is_handler, before = isinstance(part, ast.ExceptHandler), dict(self.aliases)
            self._guards += is_handler
            self.visit(part)
            self._guards -= is_handler
            self.aliases.update(before if is_handler else {})

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name in _LEGACY_METHODS:
            self._add_use(METHODS_OF_LEGACY, node, alias=self._base)
        # The gradient of an operator that the script might never use.
        is_registered = any("RegisterGradient" in ast.unparse(each) for each in node.decorator_list)
        names = [each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)]
        self._guards += is_registered
        for each in (*node.decorator_list, node.args, *filter(None, [node.returns])):
            self.visit(each)
        hidden = {name: self.aliases.pop(name) for name in names if name in self.aliases}
        for each in node.body:
            self.visit(each)
        self._guards -= is_registered
        self.aliases.update(hidden)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        before, self._base = self._base, next(filter(None, map(self._resolve_dotted, node.bases)), "")
        self.generic_visit(node)
        self._base = before

    def visit_If(self, node: ast.If) -> None:
        """Marks names in conditional code as guarded if the condition can depend on which names exist.

        These are imports of one name in both branches, as in `if is_py2: import Queue as queue`, `else: import queue`;
        names that the condition tests, as in `if "concat_v2" in dir(tf)`; and all names after a test of a version.
        """
        chosen = set.intersection(*({*map(_single_imported_name, part)} for part in (node.body, node.orelse))) - {None}
        asks_version = any(getattr(each, "attr", "") in _VERSIONS for each in ast.walk(node.test))
        with self._mark_names_as_tested(node.test):
            self.visit(node.test)
            for statement in (*node.body, *node.orelse):
                is_guarded = asks_version or _single_imported_name(statement) in chosen
                self._guards += is_guarded
                self.visit(statement)
                self._guards -= is_guarded

    def visit_IfExp(self, node: ast.IfExp) -> None:
        with self._mark_names_as_tested(node.test):
            self.generic_visit(node)

    @contextlib.contextmanager
    def _mark_names_as_tested(self, test: ast.expr) -> Iterator[None]:
        """Treats names as guarded inside the `with` block if the condition `test` checks that they exist."""
        before = len(self._tested)
        self._tested.extend(find_names_tested_for_existence(test))
        yield
        del self._tested[before:]

    def visit_Assign(self, node: ast.Assign) -> None:
        """Adds an alias for an assignment such as `flags = tf.flags`."""
        name = self._resolve_dotted(node.value)
        if name and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            self.aliases[node.targets[0].id] = name
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if self._resolve_dotted(node.func) in ("os.environ.update", "os.environ.setdefault", "os.putenv"):
            self.variables[ANY] = SET
        if find_old_mode(node) is not None:
            self._add_use(f"{OF_OLD}.open", node)
        self._call = node
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self._resolve_dotted(node)
        if name is None:
            if node.attr in OLD_METHODS:
                self._add_use(f"{OF_OLD}.{node.attr}", node)
            self.generic_visit(node)
            return
        first = node.value
        while isinstance(first, ast.Attribute):
            first = first.value
        self._add_use_of_node(name, node, self.aliases[first.id])

    def visit_Name(self, node: ast.Name) -> None:
        known = self.aliases.get(node.id, "")
        if "." in known:
            self._add_use_of_node(known, node, known)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Notes a text such as `"training.loop.train"`, which can name a module of the user's tree to import."""
        if isinstance(node.value, str) and _DOTTED_NAME.fullmatch(node.value):
            self.texts.append(node.value)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """Notes that `os.environ["NAME"]` reads or sets an environment variable."""
        if self._resolve_dotted(node.value) == "os.environ":
            name = node.slice.value if isinstance(node.slice, ast.Constant) else ANY
            if isinstance(node.ctx, ast.Store):
                self.variables[name] = SET
            elif isinstance(name, str) and name != ANY and not self._guards:
                self.variables.setdefault(name, node.lineno)
        self.generic_visit(node)

    def _add_use_of_node(self, name: str, node: ast.expr, alias: str) -> None:
        call = self._call if self._call is not None and self._call.func is node else None
        self._add_use(name, node, call=call and _read_call(call), alias=alias)

    def _resolve_dotted(self, node: ast.expr) -> str | None:
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self.aliases:
            return None
        return ".".join([self.aliases[node.id], *reversed(parts)])

    def _add_use(self, name: str, node: ast.AST, is_import: bool = False, **more: object) -> None:
        is_guarded = self._guards > 0 or not {*self._tested}.isdisjoint(name.split("."))
        self.uses.append(NameUse(name, SourcePlace(self._path, node.lineno), is_import, is_guarded, **more))


def _single_imported_name(node: ast.stmt) -> str | None:
    """Returns the name that an import of a single name binds; None for other statements."""
    if not isinstance(node, (ast.Import, ast.ImportFrom)) or len(node.names) > 1:
        return None
    return node.names[0].asname or node.names[0].name


def _read_call(node: ast.Call) -> ScriptCall:
    is_starred = any(isinstance(argument, ast.Starred) for argument in node.args)
    keywords = tuple(keyword.arg for keyword in node.keywords if keyword.arg)
    return ScriptCall(None if is_starred else len(node.args), keywords, len(keywords) < len(node.keywords), node)


def _list_names_bound_by_star(module: str) -> dict[str, str]:
    """Returns the names that `from module import *` binds, with their full names; {} for modules not examined."""
    if not module.startswith(_EXAMINED):
        return {}
    return {name: f"{module}.{name}" for name in list_exported_names(module)}
