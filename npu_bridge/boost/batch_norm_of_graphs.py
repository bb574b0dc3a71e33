"""Removes batch normalisations from a TF 1 graph that has no gradients yet."""

from __future__ import annotations

import re

import tensorflow as tf

from npu_bridge.base.errors import message
from npu_bridge.base.search import search
from npu_bridge.base.tf_internals.graphs import update_input
from npu_bridge.boost import batch_norm_patterns as patterns
from npu_bridge.graph.operators import consumers

_NORMS = ("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")
_KINDS = {
    "Add": patterns.ADD,
    "AddV2": patterns.ADD,
    "BiasAdd": patterns.PASS,
    "Cast": patterns.PASS,
    "ConcatV2": patterns.CONCAT,
    "Conv2D": patterns.CONV,
    "DepthwiseConv2dNative": patterns.DEPTHWISE,
    "Elu": patterns.ACT,
    "Identity": patterns.PASS,
    "LeakyRelu": patterns.ACT,
    "Pad": patterns.PASS,
    "Relu": patterns.ACT,
    "Relu6": patterns.ACT,
    **dict.fromkeys(_NORMS, patterns.NORM),
}
# Operators between a variable and the operators that compute with it, and operators that initialise it.
_PASSING_ON = ("Cast", "Identity", "ReadVariableOp")
_INITIALISING = ("Assign", "AssignVariableOp", "IsVariableInitialized", "VarIsInitializedOp")
_NOT_READING = ("Shape", "ShapeN", "Size", "Rank")
# Operators whose result no network reads; with names such as HistogramSummary and AudioSummaryV2.
_OBSERVING = re.compile(r"Summary(V2)?$|^Assert$|^PrintV2$")
_DROPOUT_SCALES = ("Mul", "RealDiv")


def remove_batch_norms_of_graph(graph: tf.Graph) -> patterns.ThinningReport:
    """Removes a graph's removable batch normalisations, with their variables and the updates of their statistics.

    Operators that read the result of a removed normalisation then read the input of this normalisation.
    Normalisations inside a condition, which TensorFlow builds if the mode is fed, are not found.

    Args:
      graph: a graph with a network and without gradients. All graphs of one training, also for evaluation, must be
        thinned alike, because their common checkpoints lack the removed variables.
    Raises:
      ValueError: the graph has been differentiated already.
    """
    for op in graph.get_operations():
        if op.type.startswith("FusedBatchNormGrad"):
            problem, got = "the graph has been differentiated already", f"the gradient {op.name}"
            fix = "Call less_batch_norm between the network and compute_gradients or minimize."
            raise ValueError(message("less_batch_norm", problem, "a graph without gradients", got, fix))
    nodes = _nodes_of(graph)
    report = patterns.make_report(nodes, patterns.match_blocks(nodes))
    removed = [graph.get_operation_by_name(name) for name in report.removed]
    for op in removed:
        _bypass_op(op)
    if removed:
        _remove_from_collections(graph, removed)
    return report


def _nodes_of(graph):
    """Returns a graph's operators as nodes for the patterns.

    Graphs for training and for evaluation get the same nodes. So dropout passes on its input, as in evaluation, and
    updates of moving statistics and operators that only observe are left out.
    """
    ops = graph.get_operations()
    left_out = {*search(_readers_of_statistics(ops), consumers), *_observing_ops(ops)}
    dropouts = _inputs_of_dropouts(ops)
    nodes = {}
    for op in ops:
        if op in left_out or op.type in _NOT_READING:
            continue
        kind = patterns.PASS if op in dropouts else _KINDS.get(op.type, patterns.OTHER)
        flowing = [dropouts[op]] if op in dropouts else list(op.inputs)
        if kind == patterns.CONCAT:
            flowing = flowing[:-1]
        elif kind not in (patterns.OTHER, patterns.ADD):
            flowing = flowing[:1]
        nodes[op.name] = patterns.Node(kind, tuple(tensor.op.name for tensor in flowing))
    return nodes


def _observing_ops(ops):
    """Returns the operators whose results only summaries, prints and assertions read, with these themselves."""
    found = set()
    for op in reversed(ops):  # so that the readers of an operator come before it
        readers = consumers(op)
        if _OBSERVING.search(op.type) or (readers and found.issuperset(readers)):
            found.add(op)
    return found


def _inputs_of_dropouts(ops):
    """Returns the tensor that passes through each operator of a dropout, `where(random >= rate, scale * x, 0)`."""
    sources, found = [op for op in ops if "Random" in op.type], {}
    drawn = set(search(sources, lambda one: [user for user in consumers(one) if user.type not in _NOT_READING]))
    for op in ops:
        if op.type != "SelectV2":
            continue
        mask, kept, _ = op.inputs
        if mask.op in drawn:
            found[op] = kept
            if kept.op.type in _DROPOUT_SCALES and kept.op.inputs[1].shape.rank == 0:
                found[kept.op] = kept.op.inputs[0]
    return found


def _readers_of_statistics(ops):
    """Returns the operators that read the batch mean or variance of a normalisation."""
    return [user for op in ops if op.type in _NORMS for out in op.outputs[1:] for user in out.consumers()]


def _bypass_op(op):
    """Makes the readers of an operator's first output read its first input instead."""
    source, result = op.inputs[0], op.outputs[0]
    for user in list(result.consumers()):
        for position, tensor in enumerate(user.inputs):
            if tensor is result:
                update_input(user, position, source)


def _remove_from_collections(graph, removed_ops):
    """Removes updates of moving statistics, and variables without other readers, from the graph's collections."""
    updates = set(search(_readers_of_statistics(removed_ops), consumers))
    inside = updates.union(removed_ops)
    for name in graph.get_all_collection_keys():
        elements = graph.get_collection_ref(name)
        elements[:] = [
            element
            for element in elements
            if not (
                _is_read_only_by(element, inside) if isinstance(element, tf.Variable) else _op_of(element) in updates
            )
        ]


def _op_of(element):
    return element if isinstance(element, tf.Operation) else getattr(element, "op", None)


def _is_read_only_by(variable, ops):
    """Returns whether only operators of `ops`, and initialisers, read a variable."""
    handle = getattr(variable, "handle", variable).op
    reached = set(search([handle], lambda op: consumers(op) if op.type in (handle.type, *_PASSING_ON) else ()))
    readers = [op for op in reached if op.type not in (handle.type, *_PASSING_ON, *_INITIALISING) or op in ops]
    return bool(readers) and ops.issuperset(readers)
