"""What one `session.run` is: which operators it computes, and whether it trains."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

import tensorflow as tf

from npu_bridge.tf_internals.graphs import function_definition, is_reference

_WRITING = ("Apply", "Assign", "ResourceApply", "ResourceScatter", "ResourceSparseApply", "Scatter", "SparseApply")
_VARIABLES = ("AutoReloadVariable", "VarHandleOp", "Variable", "VariableV2")
_FORWARDING = ("Enter", "Identity", "RefEnter", "RefIdentity", "RefSwitch", "Switch")
_CALLING = ("Case", "If", "PartitionedCall", "StatefulPartitionedCall", "While")
# A run made of these alone copies values, between ranks for instance; it computes nothing, so it does not train.
_MOVING = frozenset(
    {
        "Cast",
        "Const",
        "ExpandDims",
        "HorovodBroadcast",
        "Identity",
        "IdentityN",
        "NoOp",
        "Placeholder",
        "ReadVariableOp",
        "Reshape",
        "Shape",
        "Squeeze",
    }
)


class RunKind(NamedTuple):
    """One kind of run of a graph.

    Attributes:
      trained: names of the trainable variables it trains, empty when it does not train. Runs that train the same
        variables are the same training, whatever else hooks fetch now and then.
      ops: the operators it computes.
    """

    trained: frozenset[str]
    ops: tuple[tf.Operation, ...]

    @property
    def is_training(self) -> bool:
        """Whether the run changes trainable variables by what it computes from them."""
        return bool(self.trained)


def kind_of(graph: tf.Graph, asked: Iterable[tf.Operation], fed: Collection[str] = ()) -> RunKind:
    """Finds out what a run does.

    Args:
      graph: the session's graph.
      asked: the operators that are run or fetched from.
      fed: names of tensors whose value is given.
    """
    ops = _computed(asked, frozenset(fed))
    variables = graph.get_collection(tf.compat.v1.GraphKeys.TRAINABLE_VARIABLES)
    trainable = {variable.op.name for variable in variables}
    written, read, computes = set(), set(), False
    for op in ops:
        is_writing = op.type.startswith(_WRITING) or (op.type in _CALLING and _writes_inside(graph, op))
        is_kernel = is_writing and "Assign" not in op.type  # an optimizer's kernel, or a loop: reads what it writes
        if is_kernel or not (is_writing or op.type in _MOVING or op.type in _VARIABLES):
            computes = True
        for position, tensor in enumerate(op.inputs):
            variable = _variable_behind(tensor)
            if variable is None:
                continue
            if is_writing and (position == 0 or op.type in _CALLING):
                written.add(variable)
            if not is_writing or is_kernel or position > 0:
                read.add(variable)
    trained = written & read & trainable if computes else set()
    return RunKind(frozenset(trained), tuple(ops))


def _computed(asked: Iterable[tf.Operation], fed: frozenset[str]) -> list[tf.Operation]:
    """All operators that have to run, in no particular order."""
    stack, seen = list(asked), set()
    while stack:
        op = stack.pop()
        if op in seen:
            continue
        seen.add(op)
        stack.extend(tensor.op for tensor in op.inputs if tensor.name not in fed)
        stack.extend(op.control_inputs)
    return sorted(seen, key=lambda op: op.name)


def _variable_behind(tensor: tf.Tensor) -> str | None:
    """The name of the variable whose handle or reference a tensor is; None for everything else."""
    is_handle = tensor.dtype == tf.resource or is_reference(tensor.dtype)
    while is_handle:
        op = tensor.op
        if op.type in _VARIABLES:
            return op.name
        if op.type not in _FORWARDING:
            return None
        tensor = op.inputs[0]
    return None


def _writes_inside(graph: tf.Graph, op: tf.Operation) -> bool:
    """Whether a function called by an operator writes to a variable."""
    pending = _called(op.node_def.attr)
    seen = set()
    while pending:
        name = pending.pop()
        function = function_definition(graph, name) if name not in seen else None
        seen.add(name)
        if function is None:
            continue
        for node in function.node_def:
            if node.op.startswith(_WRITING):
                return True
            pending.extend(_called(node.attr))
    return False


def _called(attributes) -> list[str]:
    names = [value.func.name for value in attributes.values() if value.func.name]
    return names + [function.name for value in attributes.values() for function in value.list.func]
