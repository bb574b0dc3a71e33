"""Says, before the first step of a job of several ranks, that its step brings nothing of the ranks together.

Such a job trains a model on each rank, and nobody sees it: every loss falls. All trainings pass one of two places. A
TF 1 graph is trained by runs of sessions; of the first run that trains it is asked whether what updates a variable is
computed from a transfer. A `tf.function` or eager steps go through `Pipeline.apply`; when the function is complete, or
the eager step about to update, it is asked whether Horovod was given anything to exchange since the pipeline was made.

Nothing is added to graphs, Horovod is not started for it, and only rank 0 looks and speaks.
"""

from __future__ import annotations

import functools
import re
import weakref

import tensorflow as tf

from npu_bridge.base import horovod_internals
from npu_bridge.base.after_import import when_loaded
from npu_bridge.base.search import search
from npu_bridge.base.terminal import logger
from npu_bridge.base.tf_internals.graphs import when_function_is_built
from npu_bridge.collective import first_run, wire_names
from npu_bridge.collective.this_process import place_in_job
from npu_bridge.gradients import collections
from npu_bridge.graph.functions import nodes_in_functions
from npu_bridge.graph.operators import producers
from npu_bridge.graph.run import Run
from npu_bridge.graph.variables import VARIABLE_TYPES, changed_variables

_LOG = logger(__name__)
# Operators of Horovod, and of TensorFlow's own strategies for several workers.
_EXCHANGE = re.compile(r"Horovod(Grouped)?(Allreduce|Allgather|Alltoall|Reducescatter)|Collective(Reduce|Gather|AllTo)")
_BROADCAST = re.compile(r"HorovodBroadcast")


def watch_sessions() -> int:
    """Has all sessions of this process looked at, if this is rank 0 of several ranks; again is as good as once.

    Returns:
      How often Horovod was given values of ranks to bring together, counted from the first call on.
    """
    rank, size = place_in_job()
    if size == 1 or rank > 0:
        return 0
    _watch_once()
    return _exchanges_of_this_process().count


def note_update(exchanges_before: int) -> None:
    """Looks at an update that is about to be made, outside of TF 1 graphs, by a pipeline that exchanges nothing.

    Args:
      exchanges_before: what `watch_sessions` gave when the pipeline was made.
    """
    rank, size = place_in_job()
    if rank > 0 or size == 1:
        return

    def tell():
        if watch_sessions() == exchanges_before:
            _say_once(size)

    function = wire_names.counting_graph()
    if function is None:
        tell()
    elif function.building_function:
        # What is exchanged after the update, weights perhaps, is not there yet.
        when_function_is_built(function, tell)
    # Else it is a TF 1 graph, perhaps a branch of a condition in it, whose sessions are looked at.


class _Exchanges:
    def __init__(self):
        self.count = 0

    def note(self):
        self.count += 1


@functools.cache
def _exchanges_of_this_process() -> _Exchanges:
    exchanges = _Exchanges()
    when_loaded(
        horovod_internals.OPERATORS_MODULE,
        lambda module: horovod_internals.call_at_exchanges(module, exchanges.note),
    )
    return exchanges


@functools.cache
def _watch_once() -> None:
    first_run.add_check(None, _FirstTraining())


class _FirstTraining(first_run.Check):
    """Before the first run of each graph that trains."""

    def __init__(self):
        self._seen: weakref.WeakSet = weakref.WeakSet()

    def is_due(self, session):
        graph = session.graph
        return graph not in self._seen and bool(graph.get_collection_ref(tf.compat.v1.GraphKeys.TRAINABLE_VARIABLES))

    def concerns(self, run):
        # What is assigned without a kernel of an optimizer may be weights that are clipped between steps.
        return bool(run.trained) and (run.trains or bool(collections.pipelines_in(run.ops[0].graph)))

    def act(self, session, run):
        self._seen.add(session.graph)
        if not is_exchanged(session.graph, run):
            _say_once(place_in_job()[1])


def is_exchanged(graph: tf.Graph, run: Run) -> bool:
    """Whether a run updates variables by what is computed from values of several ranks.

    Gradients may wait in variables between runs, and weights be averaged in a run of their own: the way goes back
    through variables, to whatever changes them. A broadcast counts only in the run itself: others give start values.
    """
    writers: dict[str, list] = {}
    for op in graph.get_operations():
        for name in changed_variables([op]):
            writers.setdefault(name, []).append(op)

    def behind(op):
        return [*producers(op.inputs), *(writers.get(op.name, ()) if op.type in VARIABLE_TYPES else ())]

    in_run = set(run.ops)
    updates = [op for name in run.trained for op in writers.get(name, ())]
    return any(_brings_together(op, op in in_run) for op in search(updates, behind))


def _brings_together(op, is_in_run):
    kinds = (op.type, *(node.op for node in nodes_in_functions(op.graph, [op.node_def])))
    return any(_EXCHANGE.match(kind) or (is_in_run and _BROADCAST.match(kind)) for kind in kinds)


@functools.cache
def _say_once(size: int) -> None:
    _LOG.warning(
        "npu_bridge: %d ranks train apart: a step brings neither gradients nor weights of the ranks together, so each "
        "rank trains a model of its own, and only that of rank 0 is kept.",
        size,
    )
    _LOG.warning(
        "npu_bridge: to train one model, write is_distributed=True where the optimizer is made (NPUOptimizer, "
        "npu_keras_optimizer), or put NPUDistributedOptimizer, in Keras KerasDistributeOptimizer, around a stock one; "
        "to train alone, start one rank."
    )
