"""Defines `StragglerHook`, which names slow ranks, for which the other ranks wait."""

from __future__ import annotations

import sys
import time
import weakref
from typing import Any, TextIO

import numpy as np
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.collective.apart import SeparateGraph
from npu_bridge.collective.checks.exchanges import disable_exchange_count
from npu_bridge.graph.run import SessionRun, run_of_context
from npu_bridge.graph.variables import global_step_of
from npu_bridge.reporting.history import Comparison
from npu_bridge.reporting.output import choose_output
from npu_bridge.reporting.stragglers import OwnWorkTimes, compare_ranks, describe_changes
from npu_bridge.session import steps_per_run
from npu_bridge.tailing.reduction_moments import ReductionMoments, mark_reductions

_KEY = ("npu_bridge", "comparison_of_ranks")  # TensorFlow exports collections with text keys only


class StragglerHook(tf.estimator.SessionRunHook):
    """A hook that reports a slow rank once, and again when the rank has recovered. On one rank, it does nothing.

    All ranks of a training take the same time for a step, so the hook compares each rank's own work. Own work is the
    time from the end of the previous step's reductions until the rank's last gradient is ready, including input, hooks
    and Python. The rest of a step is waiting, for other ranks and for the network.

    The ranks compare every 50 steps. A rank is slow if, in each fifth of these steps, its own work takes 20 % more than
    the own work of the others, and at least 2 ms more. The rank has recovered when its own work takes less than 10 %
    more. Work and waiting are medians, so that saving does not count. If gradients are accumulated, a step is a whole
    update. With `iterations_per_loop`, all steps of a run count as waiting as long as the last step.

    A `ProgressHook`, a `HistoryHook`, a `ReportHook` and a `TensorBoardHook` of the same session show the results.
    Every `NPUEstimator` has a StragglerHook.

    Args:
      stream: where rank 0 prints. None: the `sys.stderr` at the time of printing.
    Graph: at the first training step, adds two clocks, which change no value; adds nothing if gradients are sent in a
      loop.
    Ranks: collective; every rank needs the hook, at the same place among hooks with collectives.
    Example: with tf.train.MonitoredTrainingSession(hooks=[StragglerHook(), ProgressHook(1000)]) as session: ...
    """

    def __init__(self, stream: TextIO | None = None):
        self._stream = stream
        self._moments: weakref.WeakKeyDictionary[SessionRun, ReductionMoments | tuple] = weakref.WeakKeyDictionary()
        self._gathering: SeparateGraph | None = None
        self._latest: Comparison | None = None  # can be from an earlier session, so that nothing is reported twice
        self._work = OwnWorkTimes()

    def after_create_session(self, session, coord):
        """Resets the measurements."""
        del coord
        self._work = OwnWorkTimes()
        self._moments.clear()
        _comparisons_of(session.graph).clear()

    def before_run(self, run_context):
        """Fetches two times: when the gradients were ready for the reductions, and when the reductions were done."""
        if collective.current().size == 1:
            return None
        run = run_of_context(run_context)
        if run not in self._moments:
            self._moments[run] = (run.trains and mark_reductions(run_context.session.graph, run)) or ()
        moments = self._moments[run]
        return tf.estimator.SessionRunArgs(moments) if moments else None

    def after_run(self, run_context, run_values):
        """Adds up the times of the step; compares the ranks after enough steps."""
        if not run_values.results:
            return
        ready, done, is_update = run_values.results
        own = self._work.add_run(ready, done, is_update, steps_per_run(run_context.session))
        if own is not None:
            self._compare_ranks(run_context.session, own)

    def end(self, session):
        """Closes the graph in which ranks are compared."""
        if self._gathering is not None:
            self._gathering.close()
            self._gathering = None

    def _compare_ranks(self, session, own_times):
        ranks, row = collective.current(), np.array([own_times])
        if self._gathering is None:
            with disable_exchange_count():
                self._gathering = SeparateGraph(lambda row: ranks.all_gather(row, "straggler_times"), row)
        found = self._gathering.run(row)
        self._work.exclude_time_until(time.time())
        if ranks.rank > 0:
            return
        counter = global_step_of(session.graph)
        step = 0 if counter is None else int(session.run(counter))
        before = self._latest
        slow = before.slow if before else []
        self._latest = compare_ranks(step, round(time.time(), 3), found[:, :-1].tolist(), found[:, -1].tolist(), slow)
        _comparisons_of(session.graph)[:] = [self._latest]
        output = choose_output(self._stream or sys.stderr)
        for text in describe_changes(before, self._latest):
            output.note(f"npu_bridge: {text}")


def latest_comparison(graph: Any) -> Comparison | None:
    """Returns the latest comparison of ranks by a `StragglerHook` in a graph's session; only rank 0 has one."""
    kept = None if graph is None else _comparisons_of(graph)
    return kept[-1] if kept else None


def _comparisons_of(graph: tf.Graph) -> list[Comparison]:
    return graph.get_collection_ref(_KEY)
