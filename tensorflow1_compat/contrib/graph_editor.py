"""`tf.contrib.graph_editor`: looking around in graphs, moving connections, copying parts."""

from __future__ import annotations

import re

import tensorflow.compat.v1 as tf

from npu_bridge.base.search import search as _search
from npu_bridge.base.tf_internals import graphs


def make_list_of_op(ops, check_graph=True, allow_graph=True, ignore_ts=False):
    """Operations of a graph, an operation, or a list of them."""
    if isinstance(ops, tf.Graph):
        return ops.get_operations()
    if isinstance(ops, (list, tuple)) and not ignore_ts and not all(isinstance(op, tf.Operation) for op in ops):
        raise TypeError(f"make_list_of_op: expected operations; got {ops}. Write tensor.op for the one that makes it.")
    ops = tf.nest.flatten(list(ops) if isinstance(ops, (list, tuple, set)) else ops)
    return [op for op in ops if isinstance(op, tf.Operation)] if ignore_ts else [
        op if isinstance(op, tf.Operation) else op.op for op in ops
    ]  # fmt: skip


def make_list_of_t(ts, check_graph=True, allow_graph=True, ignore_ops=False):
    """Tensors of a graph, a tensor, or a list of them."""
    if isinstance(ts, tf.Graph):
        return [tensor for op in ts.get_operations() for tensor in op.outputs]
    ts = tf.nest.flatten(list(ts) if isinstance(ts, (list, tuple, set)) else ts)
    return [tensor for tensor in ts if tf.is_tensor(tensor)] if ignore_ops else ts


def filter_ts(ops, positive_filter=None):
    """Output tensors of operations that the filter (tensor -> bool) lets through."""
    tensors = [tensor for op in make_list_of_op(ops) for tensor in op.outputs]
    return [tensor for tensor in tensors if positive_filter in (None, True) or positive_filter(tensor)]


def filter_ts_from_regex(ops, regex):
    """Output tensors whose names the expression finds."""
    pattern = re.compile(regex)
    return filter_ts(ops, lambda tensor: pattern.search(tensor.name) is not None)


def filter_ops(ops, positive_filter=None):
    """Operations that the filter (operation -> bool) lets through."""
    return [op for op in make_list_of_op(ops) if positive_filter in (None, True) or positive_filter(op)]


def filter_ops_from_regex(ops, regex):
    """Operations whose names the expression finds."""
    pattern = re.compile(regex)
    return filter_ops(ops, lambda op: pattern.search(op.name) is not None)


def select_ops(*args, graph=None, positive_filter=None, restrict_ops_regex=None, **_):
    """Operations named by objects and by expressions."""
    graph, found = graph or tf.get_default_graph(), []
    for arg in args:
        ops = filter_ops_from_regex(graph, arg) if isinstance(arg, str) else make_list_of_op(arg)
        found += [op for op in filter_ops(ops, positive_filter) if op not in found]
    if restrict_ops_regex:
        found = filter_ops_from_regex(found, restrict_ops_regex)
    return found


def select_ts(*args, graph=None, positive_filter=None, **_):
    """Tensors named by objects and by expressions."""
    graph, found = graph or tf.get_default_graph(), []
    for arg in args:
        tensors = filter_ts_from_regex(graph, arg) if isinstance(arg, str) else make_list_of_t(arg)
        found += [each for each in tensors if all(each is not other for other in found)
                  and (positive_filter is None or positive_filter(each))]  # fmt: skip
    return found


def _walk(seeds, neighbours, within_ops, stop_at=(), inclusive=True, within_ops_fn=None):
    seeds = [each if isinstance(each, tf.Operation) else each.op for each in tf.nest.flatten(seeds)]
    limits = None if within_ops is None else set(make_list_of_op(within_ops))
    stops = set(make_list_of_op(stop_at or []))

    def onwards(op):
        near = [] if op in stops else neighbours(op)
        near = [other for other in near if within_ops_fn is None or within_ops_fn(other)]
        return [other for other in near if limits is None or other in limits]

    found = list(_search(seeds, onwards))
    return found if inclusive else [op for op in found if op not in seeds]


def get_backward_walk_ops(
    seed_ops, inclusive=True, within_ops=None, within_ops_fn=None, stop_at_ts=(), control_inputs=False
):
    """Operations that the seeds (operations or tensors) depend on, in waves from the seeds."""
    stops = {id(tensor) for tensor in stop_at_ts}

    def before(op):
        found = [tensor.op for tensor in op.inputs if id(tensor) not in stops]
        return found + (list(op.control_inputs) if control_inputs else [])

    return _walk(seed_ops, before, within_ops, (), inclusive, within_ops_fn)


def get_forward_walk_ops(
    seed_ops, inclusive=True, within_ops=None, within_ops_fn=None, stop_at_ts=(), control_outputs=None
):
    """Operations that depend on the seeds (operations, or tensors for their readers), in waves from the seeds."""
    if tf.is_tensor(seed_ops) or (isinstance(seed_ops, (list, tuple)) and all(map(tf.is_tensor, seed_ops))):
        seed_ops = list(dict.fromkeys(op for tensor in make_list_of_t(seed_ops) for op in tensor.consumers()))
    stops = {id(tensor) for tensor in stop_at_ts}

    def after(op):
        found = [each for tensor in op.outputs if id(tensor) not in stops for each in tensor.consumers()]
        return found + (list(graphs.control_outputs(op)) if control_outputs else [])

    return _walk(seed_ops, after, within_ops, (), inclusive, within_ops_fn)


def get_walks_intersection_ops(forward_seed_ops, backward_seed_ops, **kwargs):
    """Operations on the ways from the first seeds to the second ones."""
    forward = set(get_forward_walk_ops(forward_seed_ops))
    return [op for op in get_backward_walk_ops(backward_seed_ops) if op in forward]


def get_within_boundary_ops(ops, seed_ops, boundary_ops=(), inclusive=True, **kwargs):
    """Operations among `ops` around the seeds, up to the boundary."""
    limits = make_list_of_op(ops)
    forward = _walk(seed_ops, lambda op: [c for t in op.outputs for c in t.consumers()], limits, boundary_ops)
    backward = _walk(seed_ops, lambda op: [tensor.op for tensor in op.inputs], limits, boundary_ops)
    found = set(forward) | set(backward)
    return [op for op in limits if op in found and (inclusive or op not in set(make_list_of_op(boundary_ops)))]


def add_control_inputs(op, cops):
    """Lets an operation wait for others."""
    graphs.add_control_inputs(op, make_list_of_op(cops))


def remove_control_inputs(op, cops):
    """Lets an operation wait for these others no more."""
    gone = set(make_list_of_op(cops))
    kept = [other for other in op.control_inputs if other not in gone]
    graphs.remove_control_inputs(op)
    graphs.add_control_inputs(op, kept)


def reroute_ts(ts0, ts1, can_modify=None, cannot_modify=None):
    """Lets the readers of tensors `ts1` read `ts0` instead.

    Args:
      ts0, ts1: tensors, in pairs.
      can_modify, cannot_modify: readers that may, or may not, be changed.

    Returns:
      The number of inputs that were changed.
    """
    may = None if can_modify is None else set(make_list_of_op(can_modify))
    may_not = set(make_list_of_op(cannot_modify or []))
    count, news, olds = 0, make_list_of_t(ts0), make_list_of_t(ts1)
    if len(news) != len(olds):
        raise ValueError(f"reroute_ts: ts0 and ts1 have to be as long as each other; got {len(news)} and {len(olds)}.")
    for new, old in zip(news, olds):
        for reader in set(old.consumers()):
            if reader in may_not or (may is not None and reader not in may):
                continue
            for place, each in enumerate(reader.inputs):
                if each is old:
                    graphs.update_input(reader, place, new)
                    count += 1
    return count


def swap_ts(ts0, ts1, can_modify=None, cannot_modify=None):
    """Lets the readers of both change sides."""
    firsts, seconds, count = make_list_of_t(ts0), make_list_of_t(ts1), 0
    readers = [(set(first.consumers()), set(second.consumers())) for first, second in zip(firsts, seconds)]
    for first, second, (of_first, of_second) in zip(firsts, seconds, readers):
        count += reroute_ts(first, second, list(of_second), cannot_modify)
        count += reroute_ts(second, first, list(of_first - of_second), cannot_modify)
    return count


class SubGraphView:
    """A list of operations with the tensors that go in and come out.

    Attributes:
      ops: the operations.
      inputs, outputs: tensors at the border.
    """

    def __init__(self, inside_ops=(), passthrough_ts=()):
        self.ops = make_list_of_op(inside_ops)
        inside = set(self.ops)
        self.graph = self.ops[0].graph if self.ops else None
        self.inputs, self.outputs = [], list(passthrough_ts)
        for op in self.ops:
            for tensor in op.inputs:
                if tensor.op not in inside and all(tensor is not each for each in self.inputs):
                    self.inputs.append(tensor)
            for tensor in op.outputs:
                readers = tensor.consumers()
                if not readers or any(reader not in inside for reader in readers):
                    self.outputs.append(tensor)


def sgv(*args, **kwargs):
    """A `SubGraphView` of operations named by objects and by expressions."""
    return SubGraphView(select_ops(*args, **kwargs))


make_view = sgv


def sgv_scope(scope, graph):
    """A `SubGraphView` of a name scope."""
    return SubGraphView(filter_ops_from_regex(graph, f"^{re.escape(scope.rstrip('/'))}/"))


def copy_with_input_replacements(
    sgv, replacement_ts, dst_graph=None, dst_scope="", src_scope="", reuse_dst_scope=False
):
    """A copy of a part of a graph that reads other tensors.

    Args:
      sgv: a `SubGraphView` or operations.
      replacement_ts: dict from a tensor that the part reads to the one the copy reads.
      dst_scope: name scope of the copy.

    Returns:
      (SubGraphView of the copy, information with `transformed(operation or tensor)`).
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
                copies[op] = _copied(op, graph, replaced, copies, src_scope)
                waiting.remove(op)
    return SubGraphView(list(copies.values())), TransformerInfo(copies)


def _copied(op, graph, replaced, copies, src_scope):
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
    """`copy_with_input_replacements` that reads what the original reads."""
    return copy_with_input_replacements(sgv, {}, dst_graph, dst_scope, src_scope, reuse_dst_scope)


class TransformerInfo:
    """What became of operations and tensors."""

    def __init__(self, info):
        self._copies = info

    def transformed(self, original, missing_fn=None):
        """The copy of an operation or tensor (or what `missing_fn` says)."""
        op = original if isinstance(original, tf.Operation) else original.op
        if op not in self._copies:
            return missing_fn(original) if missing_fn else None
        return self._copies[op] if op is original else self._copies[op].outputs[original.value_index]


def graph_replace(target_ts, replacement_ts, dst_scope="", src_scope="", reuse_dst_scope=False):
    """Tensors computed again from replaced ones.

    Args:
      target_ts: a tensor, or a structure of them.
      replacement_ts: dict from tensor to the one in its place.

    Raises:
      ValueError: no target depends on a replaced tensor.
    """
    starts = set(get_forward_walk_ops([key.op for key in replacement_ts], inclusive=False))
    targets = tf.nest.flatten(target_ts)
    between = [op for op in get_backward_walk_ops([each.op for each in targets]) if op in starts]
    if not between:
        raise ValueError("graph_replace: the targets do not depend on the tensors that are to be replaced.")
    _, info = copy_with_input_replacements(between, replacement_ts, None, dst_scope, src_scope, reuse_dst_scope)
    found = [info.transformed(each, lambda original: original) for each in targets]
    return tf.nest.pack_sequence_as(target_ts, found)
