"""Reads the signatures of installed functions and classes from their files, without importing them."""

from __future__ import annotations

import ast
import functools
from typing import NamedTuple

from tensorflow1_compat.installed import is_defined_in, locate_definition, locate_name
from tensorflow1_compat.reading import ScriptCall

__all__ = ["find_call_problem"]

# Decorators that keep a function's signature; the effect of other decorators is not known.
_KEEP_SIGNATURES = (
    "tf_export",
    "keras_export",
    "estimator_export",
    "deprecated",
    "deprecated_args",
    "deprecated_endpoints",
    "add_dispatch_support",
    "register_unary_elementwise_api",
    "register_binary_elementwise_api",
    "dispatch_for_api",
    "add_arg_scope",
    "no_automatic_dependency_tracking",
    "for_subclass_implementers",
    "do_not_convert",
    "do_not_doc_inheritable",
    "contextmanager",
    "register_keras_serializable",
    "cache",
    "lru_cache",
)
_MOST_STEPS = 12  # steps from a name through files that only re-export it


class _Parameters(NamedTuple):
    positional: list[str]
    keywords: list[str]  # that can be passed by name
    required: list[str]
    takes_any_number: bool
    takes_any_name: bool


def find_call_problem(name: str, call: ScriptCall) -> str | None:
    """Returns why a call cannot work, in a few words; None if the call can work, or its signature is unknown.

    Args:
      name: a dotted name, such as `tensorflow.nn.dropout`.
      call: the arguments of the call.
    """
    found = locate_name(name)
    if found is None:
        return None
    parameters = _find_parameters(found.module, *found.inside) if len(found.inside) == 1 else None
    if parameters is None:
        return None
    if not parameters.takes_any_name:
        for keyword in call.keywords:
            if keyword not in parameters.keywords:
                return f"has no argument {keyword!r}; it has {_join_names(parameters.keywords)}"
    if call.positional is None:
        return None
    if call.positional > len(parameters.positional) and not parameters.takes_any_number:
        return f"takes {len(parameters.positional)} arguments without a name, not {call.positional}"
    if call.is_open:
        return None
    given = {*parameters.positional[: call.positional], *call.keywords}
    missing = [argument for argument in parameters.required if argument not in given]
    return f"needs the argument {missing[0]!r}" if missing else None


def _join_names(names: list[str]) -> str:
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "") if names else "none"


@functools.cache
def _find_parameters(module: str, name: str) -> _Parameters | None:
    found = _find_definition(module, name)
    if found is None:
        return None
    module, node = found
    if isinstance(node, ast.ClassDef):
        return _parameters_of_class(module, node, _MOST_STEPS)
    return _parameters_of_function(node)


def _find_definition(
    module: str, name: str, steps: int = _MOST_STEPS
) -> tuple[str, ast.FunctionDef | ast.ClassDef] | None:
    """Returns the module and the syntax node that define a name of a module; None if they are not unique."""
    nodes = is_defined_in(module, name)
    if len(nodes) != 1 or steps == 0:
        return None  # several definitions
    (node,) = nodes
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return module, node
    if isinstance(node, str):
        return _find_installed_definition(node, steps)
    return _find_definition_of_expression(module, node.value, steps) if isinstance(node, ast.Assign) else None


def _find_installed_definition(name: str, steps: int) -> tuple[str, ast.FunctionDef | ast.ClassDef] | None:
    """Returns the module and the syntax node that define a full name such as `package.module.name`; else None."""
    found = locate_definition(name)
    if found is None or len(found.inside) != 1:
        return None
    return _find_definition(found.module, found.inside[0], steps - 1)


def _find_definition_of_expression(module: str, value: ast.expr, steps: int):
    """Returns the module and the syntax node of the definition to which an expression such as `a.b` refers, or None."""
    rest = []
    while isinstance(value, ast.Attribute):
        rest.insert(0, value.attr)
        value = value.value
    if not isinstance(value, ast.Name):
        return None
    if not rest:
        return _find_definition(module, value.id, steps - 1)
    nodes = is_defined_in(module, value.id)
    return _find_installed_definition(".".join([nodes[0], *rest]), steps) if [*map(type, nodes)] == [str] else None


def _parameters_of_function(node: ast.FunctionDef, is_method: bool = False) -> _Parameters | None:
    if not all(_keeps_signature(decorator) for decorator in node.decorator_list):
        return None
    arguments = node.args
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    required = positional[: len(positional) - len(arguments.defaults)]
    required += [one.arg for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults) if default is None]
    keywords = [argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)]
    if is_method:
        own = positional[:1]  # self, or cls
        positional, required, keywords = (
            [one for one in names if one not in own] for names in (positional, required, keywords)
        )
    if any(_decorator_name(decorator) == "add_arg_scope" for decorator in node.decorator_list):
        required = []  # the scope can provide them
    return _Parameters(positional, keywords, required, arguments.vararg is not None, arguments.kwarg is not None)


def _parameters_of_class(module: str, node: ast.ClassDef, steps: int) -> _Parameters | None:
    """Returns the parameters of `__init__` or `__new__` in a class, or in the first base class that defines one."""
    if node.keywords or steps == 0 or not all(_keeps_signature(decorator) for decorator in node.decorator_list):
        return None
    methods = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
    if maker := methods.get("__init__") or methods.get("__new__"):
        return _parameters_of_function(maker, is_method=True)
    for base in node.bases:
        found = _find_definition_of_expression(module, base, steps)
        if found is None or not isinstance(found[1], ast.ClassDef):
            return None
        if parameters := _parameters_of_class(*found, steps - 1):
            return parameters
    return None


def _keeps_signature(decorator: ast.expr) -> bool:
    return _decorator_name(decorator) in _KEEP_SIGNATURES


def _decorator_name(decorator: ast.expr) -> str:
    while isinstance(decorator, ast.Call):
        decorator = decorator.func
    return decorator.attr if isinstance(decorator, ast.Attribute) else getattr(decorator, "id", "")
