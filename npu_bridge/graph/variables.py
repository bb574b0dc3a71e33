"""Finds the variables that operators change, and whether a run trains."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import tensorflow as tf

from npu_bridge.base.search import search
from npu_bridge.base.tf_internals.graphs import function_definition, is_reference
from npu_bridge.graph.functions import nodes_in_functions
from npu_bridge.graph.operators import consumers

# Kernels of optimizers, also after TensorFlow has fused them; ScatterNd and its kin make new tensors.
_CHANGES = re.compile(r"(Resource)?(Sparse)?Apply|_Fused\w*Apply|Assign|(Resource)?Scatter(?!Nd$|NdNonAliasing)")
VARIABLE_TYPES = ("AutoReloadVariable", "VarHandleOp", "Variable", "VariableV2")
_FORWARDING = ("Enter", "Identity", "RefEnter", "RefIdentity", "RefSwitch", "Switch")
_STARTING = ("Restore", "HorovodBroadcast", "CollectiveBcast")
_CALLING = ("Case", "If", "PartitionedCall", "StatefulPartitionedCall", "While")
# A run of only these types copies values, between ranks for instance. It computes nothing, so it does not train. Nor do
# operators of integers, which give sizes and positions of what is copied.
_MOVING = frozenset(
    {
        "Bitcast",
        "Cast",
        "CollectiveBcastRecvV2",
        "CollectiveBcastSendV2",
        "Const",
        "DeepCopy",
        "EnsureShape",
        "ExpandDims",
        "HorovodBroadcast",
        "Identity",
        "IdentityN",
        "NoOp",
        "Pad",
        "Placeholder",
        "ReadVariableOp",
        "Reshape",
        "Shape",
        "Squeeze",
        "StridedSlice",
    }
)


def changes_variable(op_type: str) -> bool:
    """Returns whether operators of a type change a variable: assignments and kernels of optimizers."""
    return _CHANGES.match(op_type) is not None


def variable_behind(tensor: tf.Tensor) -> str | None:
    """Returns the name of the variable to which a tensor is a handle or a reference; None for other tensors."""
    is_handle = tensor.dtype == tf.resource or is_reference(tensor.dtype)
    while is_handle:
        op = tensor.op
        if op.type in VARIABLE_TYPES:
            return op.name
        if op.type not in _FORWARDING:
            return None
        tensor = op.inputs[0]
    return None


def changed_variables(ops: Iterable[tf.Operation]) -> set[str]:
    """Returns the names of the variables that the ops change, also inside functions that they call."""
    return _uses_of_variables(ops)[0]


def global_step_of(graph: tf.Graph | None = None) -> tf.Variable | tf.Tensor | None:
    """Returns the step counter of a graph, by default of the current graph; None if the graph has no step counter.

    A script can call any variable `global_step`, even one that is not a scalar integer. Such a variable does not count.
    """
    try:
        return tf.compat.v1.train.get_global_step(graph)
    except (TypeError, ValueError):
        return None


def is_ever_changed(variable: tf.Variable) -> bool:
    """Returns whether some operator of the graph, apart from the initializer, can change a variable."""
    forwarding = (*VARIABLE_TYPES, *_FORWARDING)

    def is_changed(copy):
        users = search([copy.op], lambda op: consumers(op) if op.type in forwarding else ())
        return any(_may_change_variable(op, copy.op.name) for op in users if op is not copy.initializer)

    return any(map(is_changed, _copies_of_variable(variable)))


def _copies_of_variable(variable: tf.Variable) -> Sequence[tf.Variable]:
    """Returns a variable's copies in a `tf.distribute` strategy, or only the variable itself if it has no copies."""
    return getattr(variable, "values", (variable,))


def _may_change_variable(op, name):
    if op.type in _CALLING:
        return any(changes_variable(node.op) for node in nodes_in_functions(op.graph, [op.node_def]))
    if not changes_variable(op.type) or variable_behind(op.inputs[0]) != name:
        return False
    value = op.inputs[1].op
    return not any(kind.startswith(_STARTING) for kind in (value.type, *(tensor.op.type for tensor in value.inputs)))


def trained_variables(graph: tf.Graph, ops: Iterable[tf.Operation], assignments_count: bool = True) -> frozenset[str]:
    """Returns the names of the trainable variables that a run changes by values computed from them.

    Initializers do not train, even where a variable starts from the value of another one. Without `assignments_count`,
    only kernels of optimizers count: assignments can also clip weights after a step.
    """
    variables = graph.get_collection(tf.compat.v1.GraphKeys.TRAINABLE_VARIABLES)
    initializers = {
        getattr(copy, "initializer", None) for variable in variables for copy in _copies_of_variable(variable)
    }
    changed, read, computes = _uses_of_variables((op for op in ops if op not in initializers), assignments_count)
    trainable = {variable.op.name for variable in variables}
    return frozenset(changed & read & trainable) if computes else frozenset()


def variables_updated_from(values: Iterable) -> list:
    """Returns the trainable variables whose updates use some of `values`, dense or sparse tensors of a TF 1 graph."""
    tensors = [part for value in values for part in tf.nest.flatten(value, expand_composites=True)]
    if not tensors:
        return []
    trainable = tensors[0].graph.get_collection(tf.compat.v1.GraphKeys.TRAINABLE_VARIABLES)
    by_name = {getattr(variable, "handle", variable).op.name: variable for variable in trainable}
    users = search([user for tensor in tensors for user in tensor.consumers()], consumers)
    updated = {tensor.op.name for op in users for tensor in op.inputs}
    return [variable for name, variable in by_name.items() if name in updated]


def _uses_of_variables(ops, assignments_count=True):
    """Returns the names of changed variables, the names of read variables, and whether the ops compute anything."""
    changed, read, computes = set(), set(), False
    for op in ops:
        is_call = op.type in _CALLING or function_definition(op.graph, op.type) is not None
        types = [node.op for node in nodes_in_functions(op.graph, [op.node_def])] if is_call else [op.type]
        changing = [kind for kind in types if changes_variable(kind)]
        has_kernel = any("Assign" not in kind for kind in changing)
        reads_what_it_changes = has_kernel or (is_call and bool(changing))
        gives_numbers = any(tensor.dtype.is_floating or tensor.dtype.is_complex for tensor in op.outputs)
        if reads_what_it_changes or (gives_numbers and not changing and op.type not in (*_MOVING, *VARIABLE_TYPES)):
            computes = True
        for position, tensor in enumerate(op.inputs):
            variable = variable_behind(tensor)
            if variable is not None:
                if (has_kernel or (changing and assignments_count)) and (position == 0 or is_call):
                    changed.add(variable)
                if reads_what_it_changes or not changing or position > 0:
                    read.add(variable)
    return changed, read, computes
