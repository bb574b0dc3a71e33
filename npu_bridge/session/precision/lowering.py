"""Imitates the decision of TensorFlow's rewriter which operators mixed precision lowers, on any machine.

The rewriter supports a dtype on some processors only, and decides when TensorFlow builds an executor. This module
decides on any machine, for the operators in a graph or in the definition of a function. It follows only float32 values
from operator to operator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from npu_bridge.base.search import search
from npu_bridge.base.tf_internals.graphs import operator_definition
from npu_bridge.session.precision.modes import BFLOAT16
from npu_bridge.session.precision.type_lists import TypeLists

_PASSING_TYPES = ("Enter", "Identity", "Switch")
_VARIABLES = ("VariableV2", "Variable", "TemporaryVariable")


class OperatorNode(NamedTuple):
    """An operator of a graph or function.

    Attributes:
      type: the operator type.
      sources: for each input the name of the producing operator, and the index of the producer's output.
      inputs, outputs: positions of the float32 inputs and outputs that get the low dtype when the operator is lowered.
      can_be_lowered: whether the operator can be lowered at all.
    """

    type: str
    sources: tuple[tuple[str, int], ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    can_be_lowered: bool = True


def find_lowered_ops(nodes: Mapping[str, OperatorNode], type_lists: TypeLists, low_dtype: str) -> frozenset[str]:
    """Returns the names of the operators that are lowered.

    Args:
      nodes: all operators by name; sources that are not among these operators are ignored.
      type_lists: the lists of operator types.
      low_dtype: "float16" or "bfloat16".
    """
    before: dict[str, list[str]] = {name: [] for name in nodes}
    after: dict[str, list[str]] = {name: [] for name in nodes}
    for name, node in nodes.items():
        for position in node.inputs:
            source, index = node.sources[position]
            if source in nodes and index in nodes[source].outputs:
                before[name].append(source)
                after[source].append(name)

    def ops_of_types(types: Collection[str], among: Iterable[str] = nodes) -> set[str]:
        return {name for name in among if nodes[name].type in types}

    def find_reachable_ops(
        starts: Collection[str], ways: Iterable[Mapping[str, list[str]]], inside: Collection[str]
    ) -> set[str]:
        """Returns `starts`, and all operators within `inside` that are reachable along `ways` (neighbours by name)."""
        return set(search(starts, lambda name: [other for way in ways for other in way[name] if other in inside]))

    can_change = {name for name, node in nodes.items() if node.can_be_lowered and (node.inputs or node.outputs)}
    allowed = ops_of_types(type_lists.allow, can_change)
    if not allowed:
        return frozenset()
    clear, infer = ops_of_types(type_lists.clear), ops_of_types(type_lists.infer)
    # Denied types deny the infer types after them, also through clear ones.
    before_infer = find_reachable_ops(ops_of_types(type_lists.deny) | infer, [before], clear)
    denied = find_reachable_ops(ops_of_types(type_lists.deny), [after], before_infer)
    open_ones = can_change - denied
    # Infer and clear types between two allowed operators are lowered.
    behind = find_reachable_ops(allowed, [after], (clear | infer) & open_ones - allowed)
    result = allowed | find_reachable_ops(allowed, [before], behind)
    if low_dtype == BFLOAT16:  # infer types right after lowered operators, too
        for name in nodes:
            if (
                name in infer
                and name in open_ones
                and denied.isdisjoint(before[name])
                and not result.isdisjoint(before[name])
            ):
                result.add(name)
    # Clear types beside lowered operators, but not those that read variables: other readers get exact values.
    free = {name for name in clear & open_ones if not _passes_on_reference_variable(name, nodes)}
    return frozenset(find_reachable_ops(result, [before, after], free))


def list_argument_of_each_value(arguments: Sequence[Any], value_of_attribute: Callable[[str], Any]) -> list[Any]:
    """Returns a list with an item for each input, or output, of an operator: the argument that declares it.

    Args:
      arguments: `input_arg` or `output_arg` of an OpDef.
      value_of_attribute: returns the value of an attribute of the operator by name: a number, or a list of dtypes.
    """
    flat = []
    for argument in arguments:
        count = 1
        if argument.number_attr:
            count = value_of_attribute(argument.number_attr)
        elif argument.type_list_attr:
            count = len(value_of_attribute(argument.type_list_attr))
        flat += [argument] * count
    return flat


@functools.cache
def find_lowerable_attributes(op_type: str) -> frozenset[str]:
    """Returns the dtype attributes of an operator type that can take a low dtype.

    The parameters of batch normalisation (attribute U) stay in float32.
    """
    definition = operator_definition(op_type)
    if definition is None:
        return frozenset()
    attributes = frozenset(attribute.name for attribute in definition.attr if attribute.type == "type")
    return attributes - {"U"} if "BatchNorm" in op_type else attributes


def node_of_op(
    op: tf.Operation, tensor_before_rounding: Callable[[tf.Tensor], tf.Tensor], can_be_lowered: bool
) -> OperatorNode:
    """Returns an operator of a graph as a node; `tensor_before_rounding` is called with each input tensor."""
    definition, attributes = op.op_def, find_lowerable_attributes(op.type)

    def low_positions(arguments, tensors):
        if all(tensor.dtype.base_dtype != tf.float32 for tensor in tensors):
            return ()
        flat = list_argument_of_each_value(arguments, op.get_attr)
        return tuple(
            place
            for place, (argument, tensor) in enumerate(zip(flat, tensors))
            if argument.type_attr in attributes and tensor.dtype.base_dtype == tf.float32
        )

    sources = tuple((tensor.op.name, tensor.value_index) for tensor in map(tensor_before_rounding, op.inputs))
    inputs, outputs = low_positions(definition.input_arg, op.inputs), low_positions(definition.output_arg, op.outputs)
    return OperatorNode(op.type, sources, inputs, outputs, can_be_lowered)


def _passes_on_reference_variable(name: str, nodes: Mapping[str, OperatorNode]) -> bool:
    """Returns whether an operator passes on the value of a TF 1 reference variable."""
    node = nodes[name]
    if node.type not in _PASSING_TYPES or not node.sources or node.sources[0][0] not in nodes:
        return False
    source = node.sources[0][0]
    return nodes[source].type in _VARIABLES or _passes_on_reference_variable(source, nodes)
