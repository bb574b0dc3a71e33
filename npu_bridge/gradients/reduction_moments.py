"""Marks in a TF 1 graph when this rank has computed the inputs of its reductions, and when the last of them has ended.

One clock is read once this rank has computed the inputs that wait for no other rank, a second one after the last
reduction. So a rank's own work can be separated from its waiting, even in fragments that overlap the backward pass. The
marks are operators that wait for others and that nothing waits for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.search import search
from npu_bridge.base.tf_internals.graphs import add_control_inputs, opened_for_changes
from npu_bridge.gradients.tailing import branches
from npu_bridge.gradients.tailing.transfers import is_integer_all_reduce
from npu_bridge.graph.control_flow import Guards, guards_of, measure_depths
from npu_bridge.graph.operators import needed_ops
from npu_bridge.graph.run import TRANSFER_TYPES, Run, sends_gradients

_KEY = ("npu_bridge", "reduction_moments")  # TensorFlow exports collections with text keys only


class Moments(NamedTuple):
    """Scalars to be fetched along with a training step.

    Attributes:
      ready: when all inputs of the reductions that this rank alone computes exist, float64 seconds since the epoch.
      done: when the last reduction has ended, likewise.
      exchanges: whether gradients are exchanged in this run, a boolean.
    """

    ready: tf.Tensor
    done: tf.Tensor
    exchanges: tf.Tensor


def mark_reductions(graph: tf.Graph, run: Run) -> Moments | None:
    """Adds the marks of a run to a graph; returns None if it sends no gradients, or sends them in a loop of the graph.

    Args:
      graph: a TF 1 graph; it can be finalized.
      run: a training step.
    Graph: adds two clocks and a flag for whether gradients are sent, once for the same collectives.
    Ranks: local.
    """
    sent = [op for op in run.ops if _is_sent(op)] or [op for op in run.ops if TRANSFER_TYPES.match(op.type)]
    depths = measure_depths(run.ops, run.fed_names)
    if not sent or any(depths[op].loops for op in sent):
        return None
    flags = [op for op in run.ops if is_integer_all_reduce(op) and op not in sent]
    names, known = frozenset(op.name for op in (*sent, *flags)), graph.get_collection_ref(_KEY)
    for marked, moments in known:
        if marked == names:
            return moments
    guards = guards_of(run.ops, run.fed_names)
    sure = {op for op in run.ops if not guards[op] and not depths[op].loops}
    behind, ends = _before_and_behind(run, [*sent, *flags], sure)
    with opened_for_changes(graph), graph.as_default(), tf.control_dependencies(None), tf.device("/cpu:0"):
        with tf.name_scope(""), tf.name_scope("reduction_moments"):
            # Not by `tf.control_dependencies`, which notes an attribute with operators that have been run already.
            ready, done = tf.timestamp("ready"), tf.timestamp("done")
            add_control_inputs(ready.op, behind)
            add_control_inputs(done.op, ends)
            known_here = {tensor.name: tensor for op in sure for tensor in op.outputs}
            exchanges = _any_runs([guards[op] for op in sent], known_here)
    known.append((names, Moments(ready, done, exchanges)))
    return known[-1][1]


def _is_sent(op):
    return sends_gradients(op.name, op.type) or (op.type in branches.TYPES and bool(branches.transfers_inside(op)))


def _before_and_behind(run: Run, sent: Sequence[tf.Operation], sure: Collection[tf.Operation]):
    """Returns the operators of this rank alone that collectives depend on, and those that end the collectives.

    Operators inside a condition are replaced by those that lead into it and out of it: these always run.
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


def _any_runs(alternatives: Iterable[Guards], known: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Returns whether one of the alternatives runs: all its guards allow it, judged by the guards that always exist."""
    sure = {frozenset(pair for pair in guards if pair[0] in known) for guards in alternatives}
    if not all(sure):
        return tf.constant(True)
    return tf.reduce_any(
        [tf.reduce_all([tf.equal(known[name], bool(value)) for name, value in guards]) for guards in sure]
    )
