"""Copies functions and, in the copies, rounds operators that mixed precision lowers to 16 bits."""

from __future__ import annotations

import collections
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.core.framework.attr_value_pb2 import AttrValue
from tensorflow.core.framework.node_def_pb2 import NodeDef

from npu_bridge.base.errors import say_once
from npu_bridge.base.search import search
from npu_bridge.base.tf_internals.graphs import operator_definition
from npu_bridge.graph.functions import called_functions
from npu_bridge.session.precision.exemptions import is_exempt_node
from npu_bridge.session.precision.lowering import (
    OperatorNode,
    find_lowerable_attributes,
    find_lowered_ops,
    list_argument_of_each_value,
)
from npu_bridge.session.precision.type_lists import EXACT, TypeLists

_FLOAT32 = tf.float32.as_datatype_enum
# Operators that run functions as a part of their step; operators of datasets do not.
_CALLING = frozenset(
    {"Case", "If", "PartitionedCall", "StatefulPartitionedCall", "StatelessCase", "StatelessIf"}
) | frozenset({"StatelessWhile", "While"})
# Operator types that have a dtype but compute nothing.
_PASSING_TYPES = frozenset({"Cast", "Const", "Identity", "IdentityN", "Switch", "Merge"})
_COMPILED = ("_XlaMustCompile", "_tf_compile")
# With these attributes TensorFlow finds another implementation of the same layer, which would not be rounded.
_IMPLEMENTATION = ("api_implements", "api_preferred_device")


def functions_run_by(op: tf.Operation) -> list[str]:
    """Returns the names of the functions that an operator runs within a step; none for operators of datasets."""
    return called_functions(op.node_def) if op.type in _CALLING else []


def count_float32_operators(nodes: Sequence[Any], find: Callable[[str], Any]) -> collections.Counter[str]:
    """Counts operators of a step that compute in float32, by type, in `NodeDef`s and in the functions that they run.

    Leaves out exempt operators, and functions that XLA compiles, because these are never lowered.

    Args:
      find: returns the FunctionDef of a function by name, or None.
    """

    def functions_of(nodes):
        names = (name for node in nodes if node.op in _CALLING for name in called_functions(node))
        return [name for name in names if find(name) is not None and not _is_compiled(find(name))]

    functions = search(functions_of(nodes), lambda name: functions_of(find(name).node_def))
    every = itertools.chain(nodes, *(find(name).node_def for name in functions))
    computing = (node for node in every if node.op not in _PASSING_TYPES and not is_exempt_node(node))
    return collections.Counter(node.op for node in computing if "T" in node.attr and node.attr["T"].type == _FLOAT32)


class _FunctionNode(NamedTuple):
    """An operator of a function definition, as an `OperatorNode`, and the names of its outputs in the definition."""

    node: OperatorNode
    outputs: tuple[str, ...]


class RoundedFunctions:
    """Makes rounded copies of functions, and of the functions that they call; each function is copied once.

    Args:
      find: returns the FunctionDef of a function by name, or None.
      lists: the lists of operator types.
      low_dtype: the dtype to which operators are rounded.
      is_exempt: returns whether a `NodeDef` keeps its dtype.
      suffix: a unique ending for the names of the copies.
    """

    def __init__(
        self,
        find: Callable[[str], Any],
        lists: TypeLists,
        low_dtype: str,
        is_exempt: Callable[[Any], bool],
        suffix: str,
    ):
        self._find, self._lists, self._low_dtype, self._is_exempt = find, lists, low_dtype, is_exempt
        self._suffix = suffix
        self._names: dict[str, str] = {}
        self._new: list[Any] = []  # definitions made since the last `take_new_definitions`

    def rounded_name(self, name: str) -> str:
        """Returns the name of the rounded copy of a function, or the function's own name if it needs no rounding."""
        if name not in self._names:
            self._names[name] = name  # a recursive call stays unrounded
            definition = self._find(name)
            if definition is not None and _is_compiled(definition):
                say_once(
                    logging.WARNING,
                    "precision: XLA removes pairs of casts, so functions that it compiles stay in float32. "
                    "Expected jit_compile=False; got jit_compile=True. Leave it out.",
                )
            elif definition is not None:
                self._names[name] = self._copy_rounded(name, definition)
        return self._names[name]

    def take_new_definitions(self) -> list[Any]:
        """Returns the copies made since the last call of this method; a function comes before its callers."""
        new, self._new = self._new, []
        return new

    def add_definitions_to(self, graph: tf.Graph) -> None:
        """Adds the copies made since the last call to the function library of a graph."""
        new = self.take_new_definitions()
        if new:
            holder = tf.compat.v1.GraphDef()
            holder.versions.CopyFrom(graph.graph_def_versions)
            holder.library.function.extend(new)
            with graph.as_default():
                tf.graph_util.import_graph_def(holder, name="")

    def _copy_rounded(self, name, definition):
        copy = type(definition)()
        copy.CopyFrom(definition)
        calls_rounded = False
        for node in copy.node_def:
            for attribute in node.attr.values() if node.op in _CALLING else ():
                for function in [attribute.func] if attribute.HasField("func") else attribute.list.func:
                    other = self.rounded_name(function.name)
                    calls_rounded |= other != function.name
                    function.name = other
        places = _nodes_by_name(copy.node_def, self._is_exempt)
        found = find_lowered_ops({key: place.node for key, place in places.items()}, self._lists, self._low_dtype)
        if not found and not calls_rounded:
            return name
        _CastInserter(copy, places, found, self._low_dtype).insert_casts()
        copy.signature.name = f"{name}{self._suffix}"
        for key in _IMPLEMENTATION:
            copy.attr.pop(key, None)
        self._new.append(copy)
        return copy.signature.name


class _CastInserter:
    """Inserts pairs of casts around operators of a function definition."""

    def __init__(self, definition: Any, places: Mapping[str, _FunctionNode], found: frozenset[str], low_dtype: str):
        self._definition, self._nodes_by_name, self._found, self._low_dtype = definition, places, found, low_dtype
        self._rounded: dict[str, str] = {}  # rounded values, by value
        self._replaced: dict[str, str] = {}  # outputs that all operators read rounded
        self._exact: set[str] = set()  # values that need no rounding
        self._casts: list[Any] = []

    def insert_casts(self) -> None:
        """Inserts the casts into the definition."""
        nodes = list(self._definition.node_def)
        for node in nodes:
            if node.name in self._found:
                self._decide_output_values(node)
        rounded = self._exact.union(self._replaced.values())
        for node in nodes:
            low = self._nodes_by_name[node.name].node.inputs if node.name in self._found else ()
            for position, value in enumerate(_data_inputs(node)):
                value = self._replaced.get(value, value)
                if position in low and value not in rounded:
                    value = self._add_cast_pair(value, node, position)
                node.input[position] = value
        for key, value in self._definition.ret.items():
            self._definition.ret[key] = self._replaced.get(value, value)
        self._definition.node_def.extend(self._casts)

    def _decide_output_values(self, node):
        place = self._nodes_by_name[node.name]
        is_exact = node.op in EXACT and bool(place.node.inputs)  # all of which are rounded
        for position in place.node.outputs:
            value = place.outputs[position]
            if is_exact:
                self._exact.add(value)
            else:
                self._replaced[value] = self._cast_to_low_and_back(value, node, f"output_{position}")

    def _add_cast_pair(self, value, node, position):
        if value not in self._rounded:
            self._rounded[value] = self._cast_to_low_and_back(value, node, f"input_{position}")
        return self._rounded[value]

    def _cast_to_low_and_back(self, value, node, value_name):
        low = tf.as_dtype(self._low_dtype).as_datatype_enum
        name = f"{node.name}/rounded_{value_name}"
        value = self._make_cast_node(f"{name}/{self._low_dtype}", value, _FLOAT32, low, node.device)
        return self._make_cast_node(name, value, low, _FLOAT32, node.device)

    def _make_cast_node(self, name, value, before, after, device):
        cast = NodeDef(name=name, op="Cast", input=[value], device=device)
        cast.attr["SrcT"].type, cast.attr["DstT"].type = before, after
        cast.attr["Truncate"].b = False
        self._casts.append(cast)
        return f"{name}:y:0"


def _data_inputs(node: Any) -> list[str]:
    return [value for value in node.input if not value.startswith("^")]


def _nodes_by_name(nodes: Iterable[Any], is_exempt: Callable[[Any], bool]) -> dict[str, _FunctionNode]:
    """Returns the operators of a function definition by name."""
    nodes = list(nodes)
    outputs = {node.name: _output_names(node) for node in nodes}
    producers = {value: (name, index) for name, values in outputs.items() for index, value in enumerate(values)}
    places = {}
    for node in nodes:
        definition = operator_definition(node.op)
        sources = tuple(producers.get(value, ("", 0)) for value in _data_inputs(node))
        low = (
            [(), ()]
            if definition is None
            else [_list_low_dtype_positions(node, definition, part) for part in ("input_arg", "output_arg")]
        )
        is_stateful = definition is not None and definition.is_stateful
        single = OperatorNode(node.op, sources, *low, can_be_lowered=not is_stateful and not is_exempt(node))
        places[node.name] = _FunctionNode(single, outputs[node.name])
    return places


def _output_names(node: Any) -> tuple[str, ...]:
    """Returns the names of an operator's outputs, as other operators of the definition refer to them."""
    definition = operator_definition(node.op)
    if definition is None:
        return ()
    flat = [
        argument.name
        for argument in list_argument_of_each_value(definition.output_arg, _attribute_reader(node, definition))
    ]
    return tuple(f"{node.name}:{name}:{place - flat.index(name)}" for place, name in enumerate(flat))


def _list_low_dtype_positions(node, definition, arguments_field):
    attributes, value_of = find_lowerable_attributes(node.op), _attribute_reader(node, definition)
    return tuple(
        place
        for place, argument in enumerate(list_argument_of_each_value(getattr(definition, arguments_field), value_of))
        if argument.type_attr in attributes and value_of(argument.type_attr) == _FLOAT32
    )


def _attribute_reader(node: Any, definition: Any) -> Callable[[str], Any]:
    """Returns a function that reads an attribute of a `NodeDef`: a number, a dtype or a list of dtypes."""

    def value_of(name):
        found = node.attr.get(name)
        if found is None:
            found = next((each.default_value for each in definition.attr if each.name == name), AttrValue())
        which = found.WhichOneof("value")
        return found.list.type if which == "list" else getattr(found, which) if which else 0

    return value_of


def _is_compiled(definition: Any) -> bool:
    return any(definition.attr[name].b for name in _COMPILED if name in definition.attr)
