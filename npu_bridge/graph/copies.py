"""Copies the part of a TF 1 graph that computes a tensor from variables, so that a run can compute the tensor twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from npu_bridge.base.errors import message
from npu_bridge.base.search import dependency_order
from npu_bridge.graph.functions import nodes_in_functions
from npu_bridge.graph.loop import COLLECTIVE_TYPES, LOOP_TYPES, export_definition
from npu_bridge.graph.operators import producers

tf1 = tf.compat.v1
# Shapes do not depend on the values of variables, so a random mask of such a shape stays the same.
_SHAPES = ("Shape", "ShapeN", "Size", "Rank")


def make_copier(tensor: tf.Tensor, variables: Sequence[Any], owner: str) -> Callable[[], tf.Tensor]:
    """Returns a function that builds a copy of `tensor`; the copy reads the variables' values at the time it runs.

    Operators that do not depend on the variables, such as a batch or dropout masks, are shared with the original; ops
    that change a state are not copied. Call the function, under control dependencies, wherever a copy is needed: in
    conditions and loops, too.

    Raises:
      ValueError: an operator in the copied part cannot be copied.
    """
    handles = {getattr(variable, "handle", variable).op for variable in variables}
    needed = dependency_order([tensor.op], lambda op: () if op.type in _SHAPES else producers(op.inputs))
    depends = set(handles)
    copied = []
    for op in needed:
        if op not in handles and op.type not in _SHAPES and depends.intersection(producers(op.inputs)):
            depends.add(op)
            copied.append(op)
            _check_can_be_copied(op, owner)
    definition, outer = export_definition(tensor.graph, copied, keeps_order=False)

    def copy():
        if not copied:
            return tf.identity(tensor)
        (made,) = tf1.import_graph_def(definition, outer, [tensor.name], name="evaluated_again")
        return made

    return copy


def _check_can_be_copied(op, owner):
    types = [op.type, *(node.op for node in nodes_in_functions(op.graph, [op.node_def]))]
    uncopyable = [name for name in types if name in LOOP_TYPES or name.startswith(COLLECTIVE_TYPES)]
    if uncopyable:
        reason = "is part of a loop" if uncopyable[0] in LOOP_TYPES else "is a collective operator"
        problem = "the loss cannot be evaluated a second time in this graph"
        got = f"{op.name}, which {reason}"
        fix = "Train eagerly or in a tf.function, with the loss as a function."
        raise ValueError(message(owner, problem, "a loss that uses neither loops nor collective operators", got, fix))
