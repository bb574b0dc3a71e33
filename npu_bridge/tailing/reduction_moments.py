"""Adds two clocks to a TF 1 graph: when this rank has computed the inputs of its reductions, and when they have ended.

The first clock is read when this rank has computed all inputs that wait for no other rank, the second one after the
last reduction. This separates the computation of a rank from its waiting, even if fragments overlap the backward pass.
No other operator waits for the clocks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.search import search
from npu_bridge.base.tf_internals.graphs import add_control_inputs, allow_graph_changes
from npu_bridge.graph.control_flow import Guards, guards_of, measure_depths
from npu_bridge.graph.operators import needed_ops
from npu_bridge.graph.run import TRANSFER_TYPES, SessionRun, sends_gradients
from npu_bridge.tailing import branches
from npu_bridge.tailing.transfers import is_integer_all_reduce

_COLLECTION = ("npu_bridge", "reduction_moments")  # not a string, so TensorFlow does not export the collection


class ReductionMoments(NamedTuple):
    """Scalars to be fetched in a training step.

    Attributes:
      ready: time at which this rank has computed its inputs of the reductions, float64 seconds since the epoch.
      done: time at which the last reduction has ended, float64 seconds since the epoch.
      exchanges: boolean, whether gradients are exchanged in this run.
    """

    ready: tf.Tensor
    done: tf.Tensor
    exchanges: tf.Tensor


def mark_reductions(graph: tf.Graph, run: SessionRun) -> ReductionMoments | None:
    """Adds operators to a graph that measure when a training step begins to send gradients, and when it has sent all.

    Args:
      graph: a TF 1 graph, which can be finalized.
      run: a training step.
    Returns:
      The scalars to fetch; None if the run sends no gradients, or sends gradients in a loop of the graph.
    Graph: adds two timestamps, and a flag for whether gradients are sent. Runs with the same collectives share these
      operators.
    Ranks: local.
    """
    sent = [op for op in run.ops if _exchanges_gradients(op)] or [op for op in run.ops if TRANSFER_TYPES.match(op.type)]
    flags = [op for op in run.ops if is_integer_all_reduce(op) and op not in sent]
    names, known = frozenset(op.name for op in (*sent, *flags)), graph.get_collection_ref(_COLLECTION)
    for marked, moments in known:
        if marked == names:
            return moments
    depths = measure_depths(run.ops, run.fed_names)
    if not sent or any(depths[op].loops for op in sent):
        return None
    guards = guards_of(run.ops, run.fed_names)
    sure = {op for op in run.ops if not guards[op] and not depths[op].loops}
    behind, ends = _operators_around_collectives(run, [*sent, *flags], sure)
    with allow_graph_changes(graph), graph.as_default(), tf.control_dependencies(None), tf.device("/cpu:0"):
        with tf.name_scope(""), tf.name_scope("reduction_moments"):
            # Not by `tf.control_dependencies`, which notes an attribute with operators that have been run already.
            ready, done = tf.timestamp("ready"), tf.timestamp("done")
            add_control_inputs(ready.op, behind)
            add_control_inputs(done.op, ends)
            known_here = {tensor.name: tensor for op in sure for tensor in op.outputs}
            exchanges = _any_alternative_runs([guards[op] for op in sent], known_here)
    known.append((names, ReductionMoments(ready, done, exchanges)))
    return known[-1][1]


def _exchanges_gradients(op):
    return sends_gradients(op.name, op.type) or (op.type in branches.TYPES and bool(branches.transfers_inside(op)))


def _operators_around_collectives(run: SessionRun, sent: Sequence[tf.Operation], sure: Collection[tf.Operation]):
    """Returns operators before the collectives, none of which waits for other ranks, and operators after them.

    Operators inside a condition are replaced by the operators that lead into it and out of it, since these always run.
    """
    waiting = set(sent)  # for another rank
    readers: dict[tf.Operation, list[tf.Operation]] = {}
    for op in run.ops:
        needed = needed_ops(op, run.fed_names)
        if not waiting.isdisjoint(needed):
            waiting.add(op)
        for other in needed:
            readers.setdefault(other, []).append(op)

    def is_own(op):
        return op in sure and op not in waiting

    made_of = search(sent, lambda op: [each for each in needed_ops(op, run.fed_names) if not is_own(each)])
    behind = {each for op in made_of for each in needed_ops(op, run.fed_names) if is_own(each) and each.type != "Const"}
    on_the_way = search(sent, lambda op: () if op in sure else readers.get(op, ()))
    return sorted(behind, key=lambda op: op.name), [op for op in on_the_way if op in sure]


def _any_alternative_runs(alternatives: Iterable[Guards], values_by_name: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Returns a boolean tensor: whether all tensors in `values_by_name` have the values of some alternative."""
    sure = {frozenset(pair for pair in guards if pair[0] in values_by_name) for guards in alternatives}
    if not all(sure):
        return tf.constant(True)
    return tf.reduce_any(
        [tf.reduce_all([tf.equal(values_by_name[name], bool(value)) for name, value in guards]) for guards in sure]
    )
