"""Applies tail optimisation to a finished graph: updates start before the last gradient is all-reduced.

With Horovod and a loss-scale optimizer, the check for overflow reads every *reduced* gradient, and every update waits
for the check. So no variable is updated until the last all-reduce is done. This module decides from the local
gradients, before they are sent: when no rank is near an overflow, the check cannot fail. The ranks agree on this by an
all-reduce of one integer. Every update then waits for this early decision and for its own gradient. When a rank is near
an overflow, the original check decides, so the numbers stay the same in every case.

`tf.cond` cannot do this, as it builds both branches: the check, one of the branches, is already in the graph. So the
condition is built from a Switch for every reduced gradient that enters the check, and a Merge for the outcome. Exactly
one of the two inputs of the Merge is computed.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os

from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.tf_internals.graphs import bring_into_context, control_flow_context, control_outputs, update_input
from npu_bridge.collective import Communicator, fragments, groups
from npu_bridge.collective.small_values import gather_values
from npu_bridge.graph.index import GraphIndex
from npu_bridge.tailing import branches
from npu_bridge.tailing.overflow_bounds import OverflowBounds, UnsupportedCheckError
from npu_bridge.tailing.report import NO_GRADIENTS, Fragment, TailingReport
from npu_bridge.tailing.transfers import find_transfer_in_functions, find_transfers

_SCOPE = "tail_optimization"
_PREDICATE_POSITION = {"If": 0, "StatelessIf": 0, "Switch": 1, "RefSwitch": 1}


@contextlib.contextmanager
def _pause_garbage_collection():
    """Turns garbage collection off: it would search the whole graph again and again while ops are added."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@_pause_garbage_collection()
def optimize_tail(graph: tf.Graph, communicator: Communicator) -> TailingReport:
    """Makes a graph decide about overflows before its last all-reduce, and orders the all-reduces of gradients.

    The graph must not have been run by a session; it is changed in place. The report says what was changed, or why
    nothing was. If the ranks make different decisions in their graphs, nothing is changed.

    Graph: name scope `tail_optimization`; an all-reduce of one integer for each decision.
    Ranks: collective: every rank calls it on the same graph, and runs the graph.
    """
    index = GraphIndex(graph)
    transfers = find_transfers(index.ops)
    report = TailingReport()
    report.fragments = [Fragment([transfer.op.name], transfer.size_bytes) for transfer in transfers]
    report.unchanged_because, report.advice = _reason_not_to_change_graph(transfers, index, communicator)
    dependent = index.descendants([transfer.op for transfer in transfers])
    decisions = _find_decisions_from_gradients(index, dependent)
    if not report.unchanged_because and not _are_decisions_equal_on_ranks(decisions, transfers):
        report.unchanged_because = "ranks would make different decisions"
        report.advice = "Build the same operators on every rank, also operators that read reduced gradients"
    if report.unchanged_because:
        return report
    bounds = OverflowBounds({transfer.op.name: transfer for transfer in transfers}, dependent, communicator.size)
    with graph.as_default(), tf.control_dependencies(None), tf.name_scope(f"{_SCOPE}/"):
        for number, decision in enumerate(decisions):
            _make_decision_early(decision, f"{_SCOPE}_{number}", index, bounds, communicator, report)
        if report.has_changed:
            report.fragments = _order_all_reduces(transfers, index, communicator.size)
    if not report.has_changed:
        if report.kept:
            known_last = ", ".join(report.kept)
            report.unchanged_because = (
                f"every update waits for all gradients, because {'; '.join(report.kept.values())}"
            )
            report.advice = f"There is nothing to do, unless the script can train without {known_last}"
        else:
            report.unchanged_because, report.advice = _reason_without_decision(index, dependent, bounds)
    return report


def _reason_not_to_change_graph(transfers, index, communicator):
    if communicator.size == 1:
        return "one rank trains alone", "There is nothing to do"
    inside = next((transfer.op for transfer in transfers if control_flow_context(transfer.op) is not None), None)
    if inside is not None:
        return f"gradients are reduced inside a condition or a loop: {inside.name}", "Reduce them outside of it"
    hidden = find_transfer_in_functions(index.ops, transfers)
    if hidden:
        return f"gradients are reduced inside a function: {hidden}", "Reduce them outside of tf.function"
    return ("", "") if transfers else (NO_GRADIENTS, "")


def _reason_without_decision(index, dependent, bounds):
    for op in index.ops:
        if op.type in branches.CALLS and op.name in dependent and not bounds.is_transfer(op):
            return (
                f"reduced gradients are used inside a function: {op.name}",
                "Use them outside of tf.function",
            )
    return "no update waits for a check of reduced gradients", "There is nothing to gain"


def _find_decisions_from_gradients(index, dependent_names):
    """Returns the boolean scalars that depend on reduced gradients and decide whether ops run, in graph order."""
    found = {}
    for op in index.ops:
        position = _PREDICATE_POSITION.get(op.type)
        if position is not None and len(op.inputs) > position:
            predicate = _skip_identities(op.inputs[position])
            if predicate.dtype == tf.bool and predicate.op.name in dependent_names:
                found.setdefault(predicate.name, predicate)
    # A decision that is the output of a branch was made by another predicate.
    return [predicate for predicate in found.values() if predicate.op.type not in ("Merge", *_PREDICATE_POSITION)]


def _are_decisions_equal_on_ranks(decisions, transfers):
    """Returns whether all ranks make the same decisions: each decision gets an all-reduce, which every rank must join.

    Ranks: collective, in a graph and a session of its own.
    """
    names = [decision.op.name.split("/") for decision in decisions]
    # The scope around the model can differ between ranks.
    scopes = len(os.path.commonprefix([name[:-1] for name in names]))
    described = [[decision.op.type, name[scopes:]] for decision, name in zip(decisions, names)]
    described += [[transfer.op.type, transfer.size_bytes] for transfer in transfers]
    digest = hashlib.blake2b(json.dumps(described).encode()).hexdigest()
    return len(set(gather_values(digest, f"{_SCOPE}_decisions"))) == 1


def _skip_identities(tensor):
    while tensor.op.type == "Identity" and not tensor.op.control_inputs:
        tensor = tensor.op.inputs[0]
    return tensor


def _make_decision_early(decision, name, index, bounds, communicator, report):
    readers = index.readers(decision)
    context = control_flow_context(decision.op)
    try:
        sure_here = bounds.is_surely_true(decision)
    except UnsupportedCheckError as error:
        if bounds.is_made_of_transfers(decision):
            report.kept[decision.op.name] = f"{error} is known only when the last gradient has arrived"
        return
    sure = communicator.all_true(sure_here, name)
    _make_check_conditional(sure, decision, index, bounds)
    # The branch for `sure`: True, and otherwise not computed; the other branch is the check.
    _, at_once = tf.raw_ops.Switch(data=sure, pred=sure)
    if context is not None:
        # A decision inside a condition is computed only when the condition holds; so must be the early decision.
        at_once = bring_into_context(context, at_once)
    early = tf.raw_ops.Merge(inputs=[decision, at_once]).output
    for op, position in readers:
        update_input(op, position, early)
    report.freed[decision.op.name] = [op.name for op, _ in readers]


def _make_check_conditional(is_surely_true, decision, index, bounds):
    """Moves a check, and the ops that only it uses, into a branch that runs only if `is_surely_true` is False."""
    members = bounds.ops_from_transfers_to(decision.op, index)
    serving = set()
    for op in reversed(members):
        users = {user.name for user in index.users(op)}
        is_alone = users <= serving and not control_outputs(op)
        if op is decision.op or (is_alone and not bounds.is_transfer(op)):
            serving.add(op.name)
    reaching = {op.name for op in members} - serving
    switched = {}
    for op in members:
        if op.name in serving:
            for position, tensor in enumerate(op.inputs):
                if tensor.op.name in reaching:
                    if tensor.name not in switched:
                        switched[tensor.name], _ = tf.raw_ops.Switch(data=tensor, pred=is_surely_true)
                    update_input(op, position, switched[tensor.name])


def _order_all_reduces(transfers, index, world_size):
    """Splits all-reduces into fragments. Each fragment waits for an earlier one, so that few are under way at once.

    Fragments are in the order in which the backward pass delivers the gradients. They follow the split strategy, with
    large fragments split again. An identity precedes each all-reduce except those of the first fragments.
    """
    made = {op.name: number for number, op in enumerate(index.ops)}
    ready = sorted(transfers, key=lambda transfer: made[transfer.sent[0].op.name])
    sizes = [transfer.size_bytes for transfer in ready]
    strategy = groups.groups_of_process().strategies.strategy_of(groups.WORLD)
    cut = strategy.split(sizes) if strategy.can_split(len(sizes)) else [list(range(len(sizes)))]
    flights = fragments.split_large_fragments(cut, sizes, world_size)
    for earlier, later in zip(flights, flights[fragments.max_concurrent_all_reduces() :]):
        with tf.control_dependencies([ready[position].op for position in earlier]):
            for transfer in (ready[position] for position in later):
                for _, place in transfer.routes:
                    update_input(transfer.entry, place, tf.identity(transfer.entry.inputs[place]))
    return [
        Fragment([ready[position].op.name for position in flight], sum(sizes[position] for position in flight))
        for flight in flights
    ]
