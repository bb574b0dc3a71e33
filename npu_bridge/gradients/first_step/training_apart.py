"""Warns, before the first training step of a job with several ranks, if the step exchanges nothing between ranks.

Such a job trains a separate model on each rank. This goes unnoticed, as every loss falls. Training is detected in two
places. TF 1 graphs are trained by runs of sessions: the first run that trains must update variables with values that
depend on a collective. Functions and eager steps are trained by `Pipeline.apply` or a Keras optimizer, which
`collective/checks/exchanges.py` watches.

The check adds nothing to graphs and does not start Horovod. Only rank 0 checks and warns.
"""

from __future__ import annotations

import functools
import re
import weakref

from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.search import search
from npu_bridge.base.tf_internals.training import call_after_gradients
from npu_bridge.collective.checks import exchanges, first_run
from npu_bridge.gradients import collections
from npu_bridge.graph.functions import nodes_in_functions
from npu_bridge.graph.operators import producers
from npu_bridge.graph.run import SessionRun, record_gradients
from npu_bridge.graph.variables import VARIABLE_TYPES, changed_variables

# Operators of Horovod, and of TensorFlow's own strategies for several workers.
_EXCHANGE = re.compile(r"Horovod(Grouped)?(Allreduce|Allgather|Alltoall|Reducescatter)|Collective(Reduce|Gather|AllTo)")
_BROADCAST = re.compile(r"HorovodBroadcast|CollectiveBcast")


def check_training_of_sessions() -> None:
    """Checks the training of all sessions, if this process is rank 0 of several ranks. Another call has no effect."""
    if exchanges.is_checking_rank():
        first_run.find_or_add_check(None, _FirstTrainingCheck, _FirstTrainingCheck)


def check_training_of_process() -> None:
    """Watches all training in this process from now on, if a launcher made it rank 0 of several ranks.

    An update without an optimizer counts as training if it is computed from gradients.
    """
    if exchanges.watch_updates():
        _install_gradient_watch()


@functools.cache
def _install_gradient_watch() -> None:
    call_after_gradients(record_gradients)


class _FirstTrainingCheck(first_run.FirstRunCheck):
    """Warns, before a graph's first training run, if its updates do not depend on gradients of several ranks."""

    def __init__(self):
        super().__init__()
        self._seen: weakref.WeakSet = weakref.WeakSet()

    def is_due(self, session):
        graph = session.graph
        return graph not in self._seen and bool(graph.get_collection_ref(tf.compat.v1.GraphKeys.TRAINABLE_VARIABLES))

    def is_needed_for(self, run):
        # Assignments without gradients and without an optimizer's kernel can be the clipping of weights.
        is_training = run.trains or run.loss is not None
        return bool(run.trained_variable_names) and (is_training or bool(collections.pipelines_in(run.ops[0].graph)))

    def make_check(self, session, run):
        self._seen.add(session.graph)
        if not updates_from_several_ranks(session.graph, run):
            exchanges.warn_ranks_train_apart()


def updates_from_several_ranks(graph: tf.Graph, run: SessionRun) -> bool:
    """Returns whether a run updates variables with values that depend on several ranks.

    Gradients can wait in variables between runs, and weights can be averaged in a run of their own. So the search goes
    back through variables to all operators that change them. A broadcast counts only in the run itself: broadcasts in
    other runs give start values.
    """
    writers: dict[str, list] = {}
    for op in graph.get_operations():
        for name in changed_variables([op]):
            writers.setdefault(name, []).append(op)

    def sources(op):
        return [*producers(op.inputs), *(writers.get(op.name, ()) if op.type in VARIABLE_TYPES else ())]

    in_run = set(run.ops)
    updates = [op for name in run.trained_variable_names for op in writers.get(name, ())]
    return any(_combines_ranks(op, op in in_run) for op in search(updates, sources))


def _combines_ranks(op, is_in_run):
    kinds = (op.type, *(node.op for node in nodes_in_functions(op.graph, [op.node_def])))
    return any(_EXCHANGE.match(kind) or (is_in_run and _BROADCAST.match(kind)) for kind in kinds)
