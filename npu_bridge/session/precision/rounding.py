"""Rounds single inputs and outputs of operators to 16 bits, while the operators compute in float32.

Pairs of casts, to the low dtype and back, go into the graph itself, before a session gets to see the operators:
TensorFlow ignores changes of those a session knows. So the graph shows what is computed. Operators inside functions
cannot be changed.
"""

from __future__ import annotations

import logging

import tensorflow as tf

from npu_bridge.base.errors import say_once
from npu_bridge.base.tf_internals.graphs import (
    control_flow_context,
    function_definitions,
    inside_control_flow_context,
    opened_for_changes,
    update_input,
)
from npu_bridge.session.precision.operator_dtypes import OperatorDtypes, Rounding

_KEY = ("npu_bridge", "rounded_values")  # TensorFlow exports collections with text keys only


class _State:
    """How far a graph was looked through, and by what single outputs were replaced."""

    def __init__(self):
        self.seen_ops = 0
        self.rounded_outputs: dict = {}


def round_values(dtypes: OperatorDtypes, graph: tf.Graph) -> None:
    """Rounds what a file asks for around operators of a graph, finalized or not, that were not looked at before.

    The rules that come first hold for a graph; it is changed once.

    Graph: two casts named `<operator>/rounded_...` for each rounded value.
    """
    if not dtypes.rounds:
        return
    state = _state_of(graph)
    ops = graph.get_operations()
    new_ops = ops[state.seen_ops :]
    if not new_ops:
        return
    _warn_about_functions(dtypes, graph)
    with opened_for_changes(graph):
        for op in new_ops:
            rule = dtypes.rounding_by_name.get(op.name) or dtypes.rounding_by_type.get(op.type)
            for position, tensor in enumerate(op.inputs):
                tensor = state.rounded_outputs.get(tensor.ref(), tensor)
                if rule is not None and position < len(rule.inputs) and _is_exact(tensor, rule.inputs[position]):
                    tensor = _rounded(tensor, rule.inputs[position], op, f"input_{position}")
                if tensor is not op.inputs[position]:
                    update_input(op, position, tensor)
            if rule is not None:
                _round_outputs(op, rule, state)
    state.seen_ops = len(graph.get_operations())


def _round_outputs(op: tf.Operation, rule: Rounding, state: _State) -> None:
    for position, (tensor, dtype) in enumerate(zip(op.outputs, rule.outputs)):
        if not _is_exact(tensor, dtype):
            continue
        consumers = tensor.consumers()
        rounded = state.rounded_outputs[tensor.ref()] = _rounded(tensor, dtype, op, f"output_{position}")
        for consumer in consumers:
            for place, taken in enumerate(consumer.inputs):
                if taken is tensor:
                    update_input(consumer, place, rounded)


def _rounded(tensor: tf.Tensor, dtype: str, op: tf.Operation, which: str) -> tf.Tensor:
    """The value as it is after a trip to the low dtype, made where the operator is: its device, loop or condition."""
    graph = op.graph
    with graph.as_default(), tf.control_dependencies(None), tf.name_scope(""), tf.device(op.device or None):
        with inside_control_flow_context(graph, control_flow_context(op)):
            low = tf.cast(tensor, dtype, name=f"{op.name}/rounded_{which}/{dtype}")
            return tf.cast(low, tensor.dtype.base_dtype, name=f"{op.name}/rounded_{which}")


def _is_exact(tensor: tf.Tensor, dtype: str | None) -> bool:
    return dtype is not None and tensor.dtype.base_dtype == tf.float32


def _state_of(graph: tf.Graph) -> _State:
    found = graph.get_collection_ref(_KEY)
    if not found:
        found.append(_State())
    return found[0]


def _warn_about_functions(dtypes: OperatorDtypes, graph: tf.Graph) -> None:
    inside = {node.op for function in function_definitions(graph) for node in function.node_def}
    missed = sorted(inside & set(dtypes.rounding_by_type))
    if missed:
        say_once(
            logging.WARNING,
            f"customize_dtypes: operators inside functions are not rounded. Expected loops and conditions without "
            f"functions; got {', '.join(missed)} inside. Call tf.disable_control_flow_v2() before the graph is built.",
        )
