"""`tf.contrib.graph_editor.select`: selects operations and tensors by name, neighbours, or paths through a graph."""

from __future__ import annotations

import re

import tensorflow.compat.v1 as tf

from npu_bridge.base.search import search as _search
from tensorflow1_compat.contrib.graph_editor.util import ControlOutputs, make_list_of_op, make_list_of_t

_TENSOR_PREFIX = "(?#ts)"


def can_be_regex(obj):
    """Returns whether an object is a string or a compiled regular expression."""
    return isinstance(obj, (str, re.Pattern))


def make_regex(obj):
    """Compiles a regular expression; raises ValueError for an object that is not a string or compiled expression."""
    if not can_be_regex(obj):
        raise ValueError(f"make_regex: expected a regular expression; got {obj!r}.")
    return re.compile(obj)


def _get_input_ts(ops):
    """Returns the tensors that operations read, without duplicates."""
    return list({id(tensor): tensor for op in make_list_of_op(ops) for tensor in op.inputs}.values())


def _get_output_ts(ops):
    """Returns the output tensors of operations."""
    return filter_ts(ops, True)


def filter_ts(ops, positive_filter=None):
    """Returns output tensors of operations that pass the filter (tensor -> bool)."""
    tensors = [tensor for op in make_list_of_op(ops) for tensor in op.outputs]
    return [tensor for tensor in tensors if positive_filter in (None, True) or positive_filter(tensor)]


def filter_ts_from_regex(ops, regex):
    """Returns output tensors of operations whose names match a regular expression."""
    pattern = re.compile(regex)
    return filter_ts(ops, lambda tensor: pattern.search(tensor.name) is not None)


def filter_ops(ops, positive_filter=None):
    """Returns operations that pass the filter (operation -> bool)."""
    return [op for op in make_list_of_op(ops) if positive_filter in (None, True) or positive_filter(op)]


def filter_ops_from_regex(ops, regex):
    """Returns operations whose names match a regular expression."""
    pattern = re.compile(regex)
    return filter_ops(ops, lambda op: pattern.search(op.name) is not None)


def select_ops(*args, graph=None, positive_filter=None, restrict_ops_regex=None, **_):
    """Returns operations, given as objects and as regular expressions for their names."""
    graph, found = graph or tf.get_default_graph(), []
    for arg in args:
        ops = filter_ops_from_regex(graph, arg) if isinstance(arg, str) else make_list_of_op(arg)
        found += [op for op in filter_ops(ops, positive_filter) if op not in found]
    if restrict_ops_regex:
        found = filter_ops_from_regex(found, restrict_ops_regex)
    return found


def select_ts(*args, graph=None, positive_filter=None, **_):
    """Returns tensors, given as objects and as regular expressions for their names."""
    graph, found = graph or tf.get_default_graph(), []
    for arg in args:
        tensors = filter_ts_from_regex(graph, arg) if isinstance(arg, str) else make_list_of_t(arg)
        found += [each for each in tensors if all(each is not other for other in found)
                  and (positive_filter is None or positive_filter(each))]  # fmt: skip
    return found


def select_ops_and_ts(*args, **kwargs):
    """Returns a list of operations and a list of tensors.

    Arguments are operations, tensors, or regular expressions for names; an expression for tensors begins with `(?#ts)`.
    """

    def selects_tensors(arg):
        return arg.startswith(_TENSOR_PREFIX) if isinstance(arg, str) else tf.is_tensor(arg)

    ops = select_ops(*(arg for arg in args if not selects_tensors(arg)), **kwargs)
    return ops, select_ts(*(arg for arg in args if selects_tensors(arg)), **kwargs)


def get_name_scope_ops(ops, scope):
    """Returns the operations in a name scope and its sub-scopes."""
    return filter_ops_from_regex(ops, f"^{re.escape(scope.rstrip('/'))}/")


def check_cios(control_inputs=False, control_outputs=None, control_ios=None):
    """Returns (control_inputs, control_outputs); (True, control_ios) if `control_ios` is given."""
    return (True, control_ios) if control_ios is not None else (control_inputs, control_outputs)


def _predecessors(op, control_inputs=False, left_out=()):
    """Returns the operations that an operation reads from; ignores the tensors whose ids are in `left_out`."""
    found = [tensor.op for tensor in op.inputs if id(tensor) not in left_out]
    return found + (list(op.control_inputs) if control_inputs else [])


def _successors(op, control_outputs=None, left_out=()):
    found = [each for tensor in op.outputs if id(tensor) not in left_out for each in tensor.consumers()]
    return found + (ControlOutputs(op.graph).get(op) if control_outputs else [])


def get_ops_ios(ops, control_inputs=False, control_outputs=None, control_ios=None):
    """Returns the neighbours of operations: operations that provide their inputs or read their outputs."""
    inputs, outputs = check_cios(control_inputs, control_outputs, control_ios)
    found = [each for op in make_list_of_op(ops) for each in (*_predecessors(op, inputs), *_successors(op, outputs))]
    return list(dict.fromkeys(found))


def compute_boundary_ts(ops):
    """Returns three lists of tensors of a subgraph: inputs, outputs (also unread ones), and tensors read inside it."""
    ops = make_list_of_op(ops)
    inside = set(ops)
    made = [tensor for op in ops for tensor in op.outputs]
    leaving = [each for each in made if not each.consumers() or any(op not in inside for op in each.consumers())]
    kept = [each for each in made if any(op in inside for op in each.consumers())]
    return [each for each in _get_input_ts(ops) if each.op not in inside], leaving, kept


def _reachable_ops(seeds, neighbours, within_ops, inclusive=True, within_ops_fn=None):
    seeds = [each if isinstance(each, tf.Operation) else each.op for each in tf.nest.flatten(seeds)]
    limits = None if within_ops is None else set(make_list_of_op(within_ops))

    def next_ops(op):
        found = [other for other in neighbours(op) if within_ops_fn is None or within_ops_fn(other)]
        return [other for other in found if limits is None or other in limits]

    found = list(_search(seeds, next_ops))
    return found if inclusive else [op for op in found if op not in seeds]


def get_backward_walk_ops(
    seed_ops, inclusive=True, within_ops=None, within_ops_fn=None, stop_at_ts=(), control_inputs=False
):
    """Returns the operations on which the seeds (operations or tensors) depend, nearest first."""
    stops = {id(tensor) for tensor in stop_at_ts}
    return _reachable_ops(
        seed_ops, lambda op: _predecessors(op, control_inputs, stops), within_ops, inclusive, within_ops_fn
    )


def get_forward_walk_ops(
    seed_ops, inclusive=True, within_ops=None, within_ops_fn=None, stop_at_ts=(), control_outputs=None
):
    """Returns the operations that depend on the seeds (operations or tensors), nearest first."""
    if tf.is_tensor(seed_ops) or (isinstance(seed_ops, (list, tuple)) and all(map(tf.is_tensor, seed_ops))):
        seed_ops = list(dict.fromkeys(op for tensor in make_list_of_t(seed_ops) for op in tensor.consumers()))
    stops = {id(tensor) for tensor in stop_at_ts}
    return _reachable_ops(
        seed_ops, lambda op: _successors(op, control_outputs, stops), within_ops, inclusive, within_ops_fn
    )


def _list_ops_of_both_walks(
    forward_seed_ops, backward_seed_ops, forward_inclusive=True, backward_inclusive=True, within_ops=None,
    within_ops_fn=None, control_inputs=False, control_outputs=None, control_ios=None,
):  # fmt: skip
    control_inputs, control_outputs = check_cios(control_inputs, control_outputs, control_ios)
    forward = get_forward_walk_ops(
        forward_seed_ops, forward_inclusive, within_ops, within_ops_fn, control_outputs=control_outputs
    )
    return forward, get_backward_walk_ops(
        backward_seed_ops, backward_inclusive, within_ops, within_ops_fn, control_inputs=control_inputs
    )


def get_walks_intersection_ops(forward_seed_ops, backward_seed_ops, *args, **kwargs):
    """Returns operations on paths from the forward seeds to the backward seeds; see `get_forward_walk_ops`."""
    forward, backward = _list_ops_of_both_walks(forward_seed_ops, backward_seed_ops, *args, **kwargs)
    return [op for op in forward if op in set(backward)]


def get_walks_union_ops(forward_seed_ops, backward_seed_ops, *args, **kwargs):
    """Returns the operations that depend on the forward seeds or on which the backward seeds depend."""
    forward, backward = _list_ops_of_both_walks(forward_seed_ops, backward_seed_ops, *args, **kwargs)
    return list(dict.fromkeys([*forward, *backward]))


def get_within_boundary_ops(
    ops, seed_ops, boundary_ops=(), inclusive=True, control_inputs=False, control_outputs=None, control_ios=None
):
    """Returns the operations of `ops` that are connected to the seeds without crossing `boundary_ops`."""
    border = set(make_list_of_op(boundary_ops or []))

    def neighbours_of(op):
        return [] if op in border else get_ops_ios(op, control_inputs, control_outputs, control_ios)

    found = set(_reachable_ops(seed_ops, neighbours_of, make_list_of_op(ops)))
    return [op for op in make_list_of_op(ops) if op in found and (inclusive or op not in border)]
