"""Marks in a TF 1 graph when this rank has all that its reductions need, and when the last of them has ended.

A clock is read behind all that the transfers of gradients are made of and that waits for no other rank, and once more
behind the last of them. So a rank's own work can be told from its waiting, in fragments that overlap the backward pass
too. The marks are operators that wait for others and that nothing waits for.
"""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from npu_bridge.base.search import search
from npu_bridge.base.tf_internals.graphs import branches_around, control_flow_context, opened_for_changes
from npu_bridge.gradients.tailing import branches
from npu_bridge.gradients.tailing.transfers import is_flag_transfer
from npu_bridge.graph.operators import needed_ops
from npu_bridge.graph.run import TRANSFER_TYPES, Run, sends_gradients

_KEY = ("npu_bridge", "reduction_moments")  # TensorFlow exports collections with text keys only
_SWITCHES = ("Switch", "RefSwitch")


class Moments(NamedTuple):
    """Tensors to be fetched along with a training step.

    Attributes:
      ready: when everything is there that this rank alone adds to the reductions, float64 seconds since the epoch.
      done: when the last reduction has ended, likewise.
      deciding: pairs of a boolean tensor and its value in runs that exchange gradients; one of them is enough. Empty
        where every run does.
    """

    ready: tf.Tensor
    done: tf.Tensor
    deciding: tuple[tuple[tf.Tensor, bool], ...]


def mark_reductions(graph: tf.Graph, run: Run) -> Moments | None:
    """The marks of a run of a graph; None where it sends no gradients, or nobody knows where conditions end.

    That is so in a loop of a graph, and in conditions of a graph that was imported from a definition.

    Args:
      graph: a TF 1 graph, which may be finalized.
      run: a training step.
    Graph: two clocks, once for the same transfers.
    Ranks: local.
    """
    sent = [op for op in run.ops if _is_sent(op)] or [op for op in run.ops if TRANSFER_TYPES.match(op.type)]
    conditions = [list(branches_around(op)) for op in sent]
    is_imported = not any(map(control_flow_context, run.ops)) and any(op.type in _SWITCHES for op in run.ops)
    if not sent or is_imported or any(what is None for around in conditions for what, _ in around):
        return None
    sent += [op for op in run.ops if is_flag_transfer(op) and op not in sent]
    names, known = frozenset(op.name for op in sent), graph.get_collection_ref(_KEY)
    for marked, moments in known:
        if marked == names:
            return moments
    behind, ends = _before_and_behind(run, sent)
    with opened_for_changes(graph), graph.as_default(), tf.control_dependencies(None), tf.device("/cpu:0"):
        with tf.name_scope(""), tf.name_scope("reduction_moments"):
            with tf.control_dependencies(behind):
                ready = tf.timestamp("ready")
            with tf.control_dependencies(ends):
                done = tf.timestamp("done")
            # What a condition reads cannot be fetched itself.
            outermost = {(what.name, branch): what for what, branch in (around[-1] for around in conditions if around)}
            deciding = tuple((tf.identity(what), branch) for (_, branch), what in outermost.items())
    moments = Moments(ready, done, deciding if all(conditions) else ())
    known.append((names, moments))
    return moments


def _is_sent(op):
    return sends_gradients(op.name, op.type) or (op.type in branches.TYPES and bool(branches.transfers_inside(op)))


def _before_and_behind(run, sent):
    """The operators of this rank alone that transfers are made of, and those with which transfers arrive.

    All of them surely run: what is inside a condition is told from what leads into it, and what comes out of it.
    """
    transfers = set(sent)
    waiting: set[tf.Operation] = set()  # for another rank
    readers: dict[tf.Operation, list[tf.Operation]] = {}
    for op in run.ops:
        needed = needed_ops(op, run.fed_names)
        if op in transfers or not waiting.isdisjoint(needed):
            waiting.add(op)
        for other in needed:
            readers.setdefault(other, []).append(op)

    def is_own(op):
        return op not in waiting and _surely_runs(op)

    made_of = list(search(sent, lambda op: [each for each in needed_ops(op, run.fed_names) if not is_own(each)]))
    behind = {each for op in made_of for each in needed_ops(op, run.fed_names) if is_own(each) and each.type != "Const"}
    on_the_way = search(sent, lambda op: () if _surely_runs(op) else readers.get(op, ()))
    ends = [op for op in on_the_way if _surely_runs(op)]
    return sorted(behind, key=lambda op: op.name), ends


def _surely_runs(op):
    """Whether it is outside of conditions and loops; what leads into a condition is half inside."""
    is_way_in = op.type in _SWITCHES or (op.type == "Identity" and op.inputs[0].op.type in _SWITCHES)
    return control_flow_context(op) is None and not is_way_in
