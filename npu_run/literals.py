"""Evaluates expressions whose values follow from a script's text alone."""

from __future__ import annotations

import ast
import collections
import operator
import re
from typing import Any, Callable, NamedTuple, NoReturn

from tensorflow1_compat.reading import FileFacts

_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
}
_LARGEST_OPERAND = 4096  # of powers computed here; larger ones are not settings
_ENCODED = ("as_bytes", "as_text", "as_str", "as_str_any")  # of `tf.compat`
_CHANGEABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp)


class UndecidedError(BaseException):
    """Raised to end a check that needs a value that the text does not show; `except Exception` does not catch it."""


class UnknownValue:
    """Stands for a value that the script's text does not show. Any use of the object raises `UndecidedError`."""

    def __getattribute__(self, name: str) -> NoReturn:
        raise UndecidedError(name)


def _raise_undecided(*_: Any, **__: Any) -> NoReturn:
    raise UndecidedError


_ASKED = re.findall(
    r"\w+",
    "bool len iter next contains getitem eq ne lt le gt ge hash repr str format call int float index complex round add "
    "radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow neg pos abs and or xor enter exit "
    "fspath array bytes reversed",
)
for _name in _ASKED:
    setattr(UnknownValue, f"__{_name}__", _raise_undecided)


def is_known(value: Any) -> bool:
    """Returns whether the text shows a value, so that it is not an `UnknownValue`."""
    return type(value) is not UnknownValue


class CallArguments(NamedTuple):
    """The arguments of a call; `is_open` is True if the text does not show all arguments."""

    positional: tuple[Any, ...]
    named: dict[str, Any]
    is_open: bool


class ExpressionEvaluator:
    """Evaluates the expressions of a file.

    The value of a name is known if the file binds the name once, at module level, outside of conditions and loops.
    """

    def __init__(self, facts: FileFacts, make: Callable[[str, ast.Call], Any]):
        """Finds the names that the file binds.

        Args:
          facts: facts about the file.
          make: returns the result of calling a dotted name, or an `UnknownValue`.
        """
        self._facts = facts
        self._make = make
        self._made: dict[ast.Call, Any] = {}
        nodes = [*ast.walk(facts.tree)]
        bound = collections.Counter(name for node in nodes for name in list_bound_names(node))
        mentions = collections.Counter(node.id for node in nodes if isinstance(node, ast.Name))
        self._bound: dict[str, ast.expr] = {}
        for node in facts.tree.body:
            for target in node.targets if isinstance(node, ast.Assign) else ():
                if isinstance(target, ast.Name) and bound[target.id] == 1:
                    # A changeable value only counts if no other code mentions it.
                    if mentions[target.id] <= 2 or not isinstance(node.value, _CHANGEABLE):
                        self._bound[target.id] = node.value

    def name_of(self, node: ast.expr) -> str | None:
        """Returns the dotted name that an expression stands for, with aliases resolved; None for other expressions."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        alias = self._facts.aliases.get(node.id) if isinstance(node, ast.Name) else None
        return alias and ".".join([alias, *parts])

    def value_of(self, node: ast.expr) -> Any:
        """Returns the value of an expression, or an `UnknownValue`."""
        try:
            return self._evaluate(node)
        except (ArithmeticError, TypeError, ValueError, RecursionError):
            return UnknownValue()

    def arguments(self, call: ast.Call) -> CallArguments:
        """Returns the arguments of a call."""
        positional: list[Any] = []
        named: dict[str, Any] = {}
        is_open = False
        for argument in call.args:
            if not isinstance(argument, ast.Starred):
                positional.append(self.value_of(argument))
            elif is_known(values := self.value_of(argument.value)) and isinstance(values, (list, tuple)):
                positional += values
            else:
                positional, is_open = [], True
                break
        for keyword in call.keywords:
            value = self.value_of(keyword.value)
            if keyword.arg is not None:
                named[keyword.arg] = value
            elif is_known(value) and isinstance(value, dict) and all(isinstance(key, str) for key in value):
                named.update(value)
            else:
                is_open = True
        return CallArguments(tuple(positional), named, is_open)

    def _evaluate(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return self.value_of(self._bound[node.id]) if node.id in self._bound else UnknownValue()
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            values = [self.value_of(each) for each in node.elts]
            kind = {ast.Tuple: tuple, ast.List: list, ast.Set: set}[type(node)]
            return kind(values) if all(map(is_known, values)) else UnknownValue()
        if isinstance(node, ast.Dict):
            values = [self.value_of(each) if each else UnknownValue() for each in (*node.keys, *node.values)]
            return dict(zip(values, values[len(node.keys) :])) if all(map(is_known, values)) else UnknownValue()
        if isinstance(node, (ast.BinOp, ast.UnaryOp)):
            return self._evaluate_arithmetic(node)
        return self._evaluate_call(node) if isinstance(node, ast.Call) else UnknownValue()

    def _evaluate_arithmetic(self, node: ast.BinOp | ast.UnaryOp) -> Any:
        if isinstance(node, ast.UnaryOp):
            value = self.value_of(node.operand)
            is_number = is_known(value) and isinstance(value, (int, float))
            return -value if is_number and isinstance(node.op, ast.USub) else UnknownValue()
        pair, compute = (self.value_of(node.left), self.value_of(node.right)), _OPERATORS.get(type(node.op))
        return compute(*pair) if compute and all(map(_is_small_number, pair)) else UnknownValue()

    def _evaluate_call(self, node: ast.Call) -> Any:
        """Evaluates a call; a later evaluation returns the same object only for a loss-scale manager.

        Other objects are made anew, because wrappers mark the objects that they get.
        """
        if node in self._made:
            return self._made[node]
        self._made[node] = UnknownValue()  # an object made of itself
        made = self._call_result(node)
        if not type(made).__name__.endswith("Manager"):
            del self._made[node]
            return made
        self._made[node] = made
        return made

    def _call_result(self, node: ast.Call) -> Any:
        name = self.name_of(node.func)
        if name is not None and name.rpartition(".")[2] in _ENCODED and len(node.args) == 1:
            return _encode_or_decode(self.value_of(node.args[0]), name)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "encode" and not node.args:
            return _encode_or_decode(self.value_of(node.func.value), "encode")
        return self._make(name, node) if name else UnknownValue()


def _encode_or_decode(value: Any, name: str) -> Any:
    """Returns the result of `as_bytes`, `as_text` or `encode` for a text."""
    if not is_known(value) or not isinstance(value, (str, bytes)):
        return UnknownValue()
    text = value if isinstance(value, str) else value.decode()
    return text.encode() if name.endswith(("as_bytes", "encode")) else text


def _is_small_number(value: Any) -> bool:
    """Returns whether a value is a number small enough for powers."""
    return is_known(value) and isinstance(value, (int, float)) and abs(value) <= _LARGEST_OPERAND


def list_bound_names(node: ast.AST) -> list[str]:
    """Returns the names that a node binds, or declares as global or nonlocal."""
    if isinstance(node, ast.Name):
        return [] if isinstance(node.ctx, ast.Load) else [node.id]
    if isinstance(node, ast.arg):
        return [node.arg]
    if isinstance(node, ast.alias):
        return [(node.asname or node.name).partition(".")[0]]
    if isinstance(node, (ast.Global, ast.Nonlocal)):
        return node.names
    return [node.name] if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) else []
