"""Imitates a dtype to which TensorFlow cannot lower on this machine: rounds inputs and outputs of float32 operators.

The rounded operators are those that TensorFlow's rewriter would lower (`lowering.py`). They are rounded in the graphs
of sessions (`rounding.py`) and in copies of functions (`rounded_functions.py`).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from npu_bridge.base import kept_in_graph
from npu_bridge.base.tf_internals.functions import add_function, eager_function_definition
from npu_bridge.base.tf_internals.graphs import function_definition
from npu_bridge.graph.loop import mark_shared_by_copies
from npu_bridge.session.precision import rounding
from npu_bridge.session.precision.exemptions import is_exempt_node
from npu_bridge.session.precision.lowering import find_lowered_ops, node_of_op
from npu_bridge.session.precision.modes import Policy
from npu_bridge.session.precision.operator_dtypes import Rounding
from npu_bridge.session.precision.rounded_functions import RoundedFunctions
from npu_bridge.session.precision.type_lists import TypeLists, type_lists_for

_numbers = itertools.count()
# Operators of loops and conditions. No casts can be inserted between these; the operators after them round instead.
_FRAMES = frozenset({"Enter", "Exit", "Merge", "NextIteration", "Switch"})


class Imitation:
    """Imitates a 16-bit dtype in one training.

    Args:
      low_dtype: "float16" or "bfloat16".
      policies: the policies under which operators may be lowered.
      variables: returns the environment variables of TensorFlow's rewriter for a policy and a graph (None for
        functions).
      ops_keeping_dtype: returns those of the given operators that keep their dtype under a policy.
    """

    def __init__(
        self,
        low_dtype: str,
        policies: Iterable[Policy],
        variables: Callable[[Policy, tf.Graph | None], Mapping[str, str]],
        ops_keeping_dtype: Callable[[Policy, Iterable[tf.Operation]], list[tf.Operation]],
    ):
        self._low_dtype, self._variables, self._ops_keeping_dtype = low_dtype, variables, ops_keeping_dtype
        number = next(_numbers)
        self._layers = {policy: f"{low_dtype}_{number}_{place}" for place, policy in enumerate(dict.fromkeys(policies))}
        self._functions: dict[Policy, RoundedFunctions] = {}
        self._lock = threading.RLock()

    def round_new_operators(self, graph: tf.Graph) -> None:
        """Adds rounding to inputs and outputs of the new operators of a graph, even if it is finalized.

        Graph: a guard (a boolean) for each policy, and two casts named `<operator>/rounded_...` for each rounded value.
        """
        for policy, name in self._layers.items():
            with rounding.edit_new_operators(graph, name, lambda: _make_rounding_flag(graph, name)) as (layer, ops):  # noqa: B023
                if not all(map(rounding.is_rounding_op, ops)):
                    self._round_ops(policy, layer, ops, graph)

    def rounding_flag_feeds(self, policy: Policy, graph: tf.Graph) -> dict[tf.Tensor, Any]:
        """Returns the values to feed, by tensor, in a run that must round as `policy` says."""
        layer = self._make_rounding_layer(policy, graph)
        return {} if layer is None else {layer.guard: np.bool_(True)}

    def replace_tensors_and_ops(self, policy: Policy, graph: tf.Graph, tensors_and_ops: Iterable[Any]) -> list[Any]:
        """Returns the tensors or operators that a run under a policy uses instead of the given ones."""
        layer = self._make_rounding_layer(policy, graph)
        if layer is None:
            return list(tensors_and_ops)
        return [layer.replaced_calls.get(each.ref() if tf.is_tensor(each) else each, each) for each in tensors_and_ops]

    def is_rounding(self, policy: Policy, ops: Iterable[tf.Operation]) -> bool:
        """Returns whether any of a run's operators, or of their functions, is rounded under a policy."""
        layers = ((self._make_rounding_layer(policy, op.graph), op) for op in ops)
        return any(
            layer is not None and (op.name in layer.rounded_ops or op in layer.replaced_calls) for layer, op in layers
        )

    def rounded_function_name(self, policy: Policy, name: str) -> str:
        """Returns the name of the rounded copy of a function that is called eagerly; creates the copy if necessary."""
        with self._lock:
            if policy not in self._functions:
                self._functions[policy] = self._make_rounded_functions(policy, None, eager_function_definition)
            functions = self._functions[policy]
            other = functions.rounded_name(name)
            for definition in functions.take_new_definitions():
                add_function(definition)
        return other

    def _round_ops(self, policy, layer, ops, graph):
        # The decision searches the whole graph: too slow for a script that adds an assignment in each step.
        is_computing = any(not op.op_def.is_stateful and any(map(_is_float32, op.inputs)) for op in ops)
        nodes = self._nodes_by_name(policy, graph) if is_computing else {}
        if is_computing:
            found = find_lowered_ops(nodes, self._type_lists_of_policy(policy, graph), self._low_dtype)
            layer.rounded_ops |= found.intersection(op.name for op in ops)

        def rule_of(op):
            if op.name not in layer.rounded_ops or op.type in _FRAMES:
                return None
            node = nodes[op.name]
            inputs, outputs = (
                tuple(self._low_dtype if place in low else None for place in range(len(tensors)))
                for low, tensors in ((node.inputs, op.inputs), (node.outputs, op.outputs))
            )
            return Rounding(inputs, outputs)

        layer.round_operators(ops, rule_of)
        rounding.call_rounded_functions(self._functions_of_graph(policy, graph), layer, ops)

    def _nodes_by_name(self, policy, graph):
        """Returns the operators of a graph as nodes by name; leaves out operators added for rounding."""
        ops = [op for op in graph.get_operations() if not rounding.is_rounding_op(op)]
        kept = set(self._ops_keeping_dtype(policy, ops))
        return {
            op.name: node_of_op(op, rounding.tensor_before_rounding, op not in kept and not op.op_def.is_stateful)
            for op in ops
        }

    def _make_rounding_layer(self, policy, graph):
        return rounding.layers_of(graph).get(self._layers.get(policy))

    def _functions_of_graph(self, policy, graph):
        """Returns the rounded copies of a graph's functions."""
        return kept_in_graph.find_or_make(
            graph,
            ("npu_bridge", "rounded_functions", self._layers[policy]),
            lambda: self._make_rounded_functions(policy, graph, lambda name: function_definition(graph, name)),
        )

    def _make_rounded_functions(self, policy, graph, find):
        suffix = f"_rounded_to_{self._layers[policy]}"
        return RoundedFunctions(
            find, self._type_lists_of_policy(policy, graph), self._low_dtype, is_exempt_node, suffix
        )

    def _type_lists_of_policy(self, policy, graph) -> TypeLists:
        return type_lists_for(self._low_dtype, self._variables(policy, graph))


def _make_rounding_flag(graph: tf.Graph, name: str) -> tf.Tensor:
    """Creates a constant False, which a run that rounds feeds as True.

    In other runs TensorFlow folds the constant, and removes the rounding.
    """
    with graph.as_default(), tf.control_dependencies(None), tf.name_scope(""), tf.device(None):
        guard = tf.constant(False, name=f"npu_bridge/rounded_to_{name}")
    rounding.mark_as_rounding_op(mark_shared_by_copies(guard.op), name)
    return guard


def _is_float32(tensor: tf.Tensor) -> bool:
    return tensor.dtype.base_dtype == tf.float32
