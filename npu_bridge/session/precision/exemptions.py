"""Exempts single operators from mixed precision, as `keep_dtype_scope` and other functions of util.py ask."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import tensorflow as tf

from npu_bridge.base.search import search
from npu_bridge.base.tf_internals.graphs import control_flow_context, set_attribute
from npu_bridge.gradients.collections import LOSS_SCALE, LOSS_SCALE_STATE, UPDATES
from npu_bridge.graph.operators import list_elements
from npu_bridge.session.precision.modes import Policy
from npu_bridge.session.precision.operator_dtypes import OperatorDtypes
from npu_bridge.session.precision.type_lists import MATRIX_TYPES

KEEP_DTYPE = "_keep_dtype"  # operators with this attribute are exempt from every change of dtype


def exempt_operator(op: tf.Operation) -> None:
    """Marks an operator as exempt from every change of dtype."""
    set_attribute(op, KEEP_DTYPE, tf.compat.v1.AttrValue(i=1))


def is_exempt(op: tf.Operation) -> bool:
    """Returns whether an operator was made in `keep_dtype_scope` or passed to `keep_tensors_dtypes`."""
    try:
        return bool(op.get_attr(KEEP_DTYPE))
    except ValueError:
        return False


def is_exempt_node(node: Any) -> bool:
    """Returns whether a `NodeDef`, for example of a function, is marked as exempt."""
    return KEEP_DTYPE in node.attr and bool(node.attr[KEEP_DTYPE].i)


def requested_types(dtypes: OperatorDtypes, graph: tf.Graph) -> dict[str, str]:
    """Returns the dtypes that `customize_dtypes` requests, by operator type.

    The rewriter selects operators by type only. To lower an operator, its whole type is allowed; `ops_keeping_dtype`
    then exempts the other operators of the type.
    """
    asked = dict(dtypes.by_type)
    for name, dtype in dtypes.by_name.items():
        for op in list_elements(graph, name) if dtype != "float32" else ():
            asked.setdefault(op.type, dtype)
    return asked


def ops_keeping_dtype(
    dtypes: OperatorDtypes, policy: Policy, ops: Iterable[tf.Operation], allowed: Collection[str] = ()
) -> list[tf.Operation]:
    """Returns the operators of a run that keep their dtype, whatever the rewriter's lists of operator types say.

    `allowed` holds the operator types that the user added to the rewriter's list of types with which lowering starts.
    """
    ops = list(ops)
    types_let_in = {op.type for op in ops if dtypes.by_name.get(op.name, "float32") != "float32"} - set(dtypes.by_type)
    if policy.reach == "all":
        types_let_in.clear()
    elif policy.reach != "nothing":
        types_let_in -= MATRIX_TYPES  # these are lowered anyway
    kept = []
    for op in ops:
        asked = dtypes.by_name.get(op.name) or dtypes.by_type.get(op.type)
        if asked == "float32" or (asked is None and (is_exempt(op) or op.type in types_let_in)):
            kept.append(op)
    if policy.reach == "nothing" or not ops:
        return kept
    states = _select_update_ops(ops)
    if policy.reach == "all":
        states |= _ops_of_loss_scale(ops)
    else:  # lowering starts only with operators of these types
        states = {op for op in states if op.type in MATRIX_TYPES or op.type in allowed}
    return [*kept, *sorted(states - set(kept), key=lambda op: op.name)]


def _select_update_ops(ops: list[tf.Operation]) -> set[tf.Operation]:
    """Selects the operators that compute optimizer states and rates: in bfloat16 a decay of 0.999 would be 1."""
    own = set(ops)
    noted = own.intersection(ops[0].graph.get_collection(UPDATES))

    def scalar_inputs(op):
        return [value.op for value in op.inputs if value.dtype == tf.float32 and value.shape.rank == 0]

    numbers = search([op for start in noted for op in scalar_inputs(start)], scalar_inputs)
    return {op for op in own.intersection(noted.union(numbers)) if _computes_in_float32(op)}


def _computes_in_float32(op: tf.Operation) -> bool:
    has_float32 = any(value.dtype == tf.float32 for value in (*op.inputs, *op.outputs))
    return bool(op.inputs) and has_float32 and not op.op_def.is_stateful


def _ops_of_loss_scale(ops: list[tf.Operation]) -> set[tf.Operation]:
    """Selects the operators that compute with a loss scale: in float16 a scale above 65504 would stay infinite."""
    graph, own = ops[0].graph, set(ops)
    states = [variable.handle for variable in graph.get_collection(LOSS_SCALE_STATE) if hasattr(variable, "handle")]

    def consumers(values):
        return [op for value in values for op in value.consumers() if op in own and control_flow_context(op) is None]

    def next_ops(op):
        # Scalars only: a gradient divided by the scale is a tensor like any other.
        return consumers(value for value in op.outputs if value.dtype == tf.float32 and value.shape.rank == 0)

    found = search(consumers([*graph.get_collection(LOSS_SCALE), *states]), next_ops)
    return {op for op in found if any(value.dtype == tf.float32 for value in op.outputs) and not op.op_def.is_stateful}
