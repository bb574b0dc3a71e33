"""`tf.contrib.graph_editor.util`: lists operations and tensors, handles names, makes placeholders."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from npu_bridge.base.tf_internals import graphs


def make_list_of_op(ops, check_graph=True, allow_graph=True, ignore_ts=False):
    """Returns the operations of a graph, an operation, or a list of operations, as a list."""
    if isinstance(ops, tf.Graph):
        return ops.get_operations()
    if isinstance(ops, (list, tuple)) and not ignore_ts and not all(isinstance(op, tf.Operation) for op in ops):
        raise TypeError(f"make_list_of_op: expected operations; got {ops}. For a tensor, pass tensor.op.")
    ops = tf.nest.flatten(list(ops) if isinstance(ops, (list, tuple, set)) else ops)
    return [op for op in ops if isinstance(op, tf.Operation)] if ignore_ts else [
        op if isinstance(op, tf.Operation) else op.op for op in ops
    ]  # fmt: skip


def make_list_of_t(ts, check_graph=True, allow_graph=True, ignore_ops=False):
    """Returns a list of tensors: all tensors of a graph, or the given ones (a tensor or a list)."""
    if isinstance(ts, tf.Graph):
        return [tensor for op in ts.get_operations() for tensor in op.outputs]
    ts = tf.nest.flatten(list(ts) if isinstance(ts, (list, tuple, set)) else ts)
    return [tensor for tensor in ts if tf.is_tensor(tensor)] if ignore_ops else ts


def get_tensors(graph):
    """Returns all tensors of a graph."""
    return make_list_of_t(graph)


def get_unique_graph(tops, check_types=None, none_if_empty=False):
    """Returns the graph of operations and tensors; raises ValueError if they have several graphs, or none is given."""
    if isinstance(tops, tf.Graph):
        return tops
    tops = tf.nest.flatten(tops)
    if check_types is not None and not all(isinstance(each, check_types) for each in tops):
        raise TypeError(f"get_unique_graph: expected {check_types}; got {tops}.")
    found = list(dict.fromkeys(each.graph for each in tops))
    if len(found) == 1 or (none_if_empty and not found):
        return found[0] if found else None
    raise ValueError(f"get_unique_graph: expected operations and tensors of one graph; got {len(found)} graphs.")


def check_graphs(*args):
    """Raises ValueError if objects are in several graphs; objects that are None are ignored."""
    get_unique_graph([each for each in args if each is not None], none_if_empty=True)


def get_generating_ops(ts):
    """Returns the operations that make tensors, without duplicates."""
    return list(dict.fromkeys(tensor.op for tensor in make_list_of_t(ts)))


def get_consuming_ops(ts):
    """Returns the operations that read tensors, without duplicates."""
    return list(dict.fromkeys(op for tensor in make_list_of_t(ts) for op in tensor.consumers()))


class ControlOutputs:
    """A mapping from each operation of a graph to the operations that wait for it (its control outputs)."""

    def __init__(self, graph):
        self.graph = graph

    def get_all(self):
        """Returns a dict from each operation with control outputs to the operations that wait for it."""
        found = {op: self.get(op) for op in self.graph.get_operations()}
        return {op: waiting for op, waiting in found.items() if waiting}

    def get(self, op):
        """Returns the operations that wait for an operation."""
        return list(graphs.control_outputs(op))


def scope_finalize(scope):
    """Returns a name scope with a slash at its end."""
    return scope if not scope or scope.endswith("/") else f"{scope}/"


def scope_dirname(scope):
    """Returns the scope of a name, with the slash at its end."""
    return scope[: scope.rfind("/") + 1]


def scope_basename(scope):
    """Returns a name without its scopes."""
    return scope[scope.rfind("/") + 1 :]


def placeholder_name(t=None, scope=None, prefix="geph"):
    """Returns the name of a placeholder for a tensor, in a scope; by default in the tensor's scope."""
    if t is None:
        return scope_finalize(scope or "") + prefix
    above = scope_dirname(t.op.name) if scope is None else scope_finalize(scope)
    return f"{above}{prefix}__{scope_basename(t.op.name)}_{t.value_index}"


def make_placeholder_from_tensor(t, scope=None, prefix="geph"):
    """Returns a placeholder for a tensor, with its type and shape."""
    return tf.placeholder(t.dtype, t.shape, placeholder_name(t, scope, prefix))


def make_placeholder_from_dtype_and_shape(dtype, shape=None, scope=None, prefix="geph"):
    """Returns a placeholder of a type and shape."""
    return tf.placeholder(dtype, shape, placeholder_name(None, scope, prefix))
