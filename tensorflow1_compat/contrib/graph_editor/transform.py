"""`tf.contrib.graph_editor.transform`: copies parts of graphs."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from tensorflow1_compat.contrib.graph_editor.select import get_backward_walk_ops, get_forward_walk_ops
from tensorflow1_compat.contrib.graph_editor.subgraph import SubGraphView


def copy_with_input_replacements(
    sgv, replacement_ts, dst_graph=None, dst_scope="", src_scope="", reuse_dst_scope=False
):
    """Copies a part of a graph, and connects the copy to other input tensors.

    Args:
      sgv: a `SubGraphView` or operations.
      replacement_ts: dict from a tensor that the part reads to the tensor that the copy reads.
      dst_scope: name scope of the copy.

    Returns:
      (SubGraphView of the copy, `TransformerInfo` of the copied operations).
    """
    part = sgv if isinstance(sgv, SubGraphView) else SubGraphView(sgv)
    graph = dst_graph or part.graph
    replaced = {key.ref() if hasattr(key, "ref") else key: value for key, value in replacement_ts.items()}
    copies = {}
    inside = set(part.ops)
    with graph.as_default(), tf.name_scope(dst_scope if not reuse_dst_scope else f"{dst_scope.rstrip('/')}/"):
        waiting = list(part.ops)
        while waiting:
            ready = [op for op in waiting if all(t.ref() in replaced or t.op not in inside or t.op in copies
                                                 for t in op.inputs)]  # fmt: skip
            if not ready:
                raise ValueError("copy_with_input_replacements: loops cannot be copied here.")
            for op in ready:
                copies[op] = _copy_op(op, graph, replaced, copies, src_scope)
                waiting.remove(op)
    return SubGraphView(list(copies.values())), TransformerInfo(copies)


def _copy_op(op, graph, replaced, copies, src_scope):
    inputs = []
    for tensor in op.inputs:
        new = replaced.get(tensor.ref())
        if new is None:
            new = copies[tensor.op].outputs[tensor.value_index] if tensor.op in copies else tensor
        inputs.append(new)
    name = op.name[len(src_scope) :].lstrip("/") if src_scope and op.name.startswith(src_scope) else op.name
    with tf.control_dependencies([copies.get(each, each) for each in op.control_inputs]):
        return graph.create_op(
            op.type, inputs, [tensor.dtype for tensor in op.outputs], name=name,
            attrs={key: op.node_def.attr[key] for key in op.node_def.attr if key != "_class"},
        )  # fmt: skip


def copy(sgv, dst_graph=None, dst_scope="", src_scope="", reuse_dst_scope=False):
    """Copies a part of a graph; the copy reads the same tensors as the original."""
    return copy_with_input_replacements(sgv, {}, dst_graph, dst_scope, src_scope, reuse_dst_scope)


class TransformerInfo:
    """A mapping from operations and tensors to their copies."""

    def __init__(self, info):
        self._copies = info

    def transformed(self, original, missing_fn=None):
        """Returns the copy of an operation or tensor; if there is no copy, `missing_fn(original)` or None."""
        op = original if isinstance(original, tf.Operation) else original.op
        if op not in self._copies:
            return missing_fn(original) if missing_fn else None
        return self._copies[op] if op is original else self._copies[op].outputs[original.value_index]


def graph_replace(target_ts, replacement_ts, dst_scope="", src_scope="", reuse_dst_scope=False):
    """Copies the operations between replaced tensors and target tensors, and returns the copied target tensors.

    Args:
      target_ts: a tensor, or a nested structure of tensors.
      replacement_ts: dict from tensor to its replacement.

    Raises:
      ValueError: no target depends on a replaced tensor.
    """
    starts = set(get_forward_walk_ops([key.op for key in replacement_ts], inclusive=False))
    targets = tf.nest.flatten(target_ts)
    between = [op for op in get_backward_walk_ops([each.op for each in targets]) if op in starts]
    if not between:
        raise ValueError("graph_replace: the targets do not depend on the replaced tensors.")
    _, info = copy_with_input_replacements(between, replacement_ts, None, dst_scope, src_scope, reuse_dst_scope)
    found = [info.transformed(each, lambda original: original) for each in targets]
    return tf.nest.pack_sequence_as(target_ts, found)
