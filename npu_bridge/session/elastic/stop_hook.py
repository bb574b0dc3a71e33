"""`StopHook`: ends the training of a session after a whole step when the job is asked to stop."""

from __future__ import annotations

import contextlib
import sys
import weakref

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.gradients.collections import pipelines_in
from npu_bridge.gradients.sync import batches_waiting
from npu_bridge.graph.run import run_of
from npu_bridge.graph.variables import global_step_of
from npu_bridge.session.elastic.stop_request import of_this_process

__all__ = ["StopHook"]

# An update of several batches is completed first; one that takes more runs than this is left open, and saved like that.
_MOST_RUNS_MORE = 1000


class StopHook(tf.estimator.SessionRunHook):
    """Ends a training in good order when a scheduler wants the machine back (SIGTERM), or the job changes its size.

    All ranks complete the step they are in, and all batches of an update (`Accumulate`), savers save it, and the
    process ends with exit code 75, which says that the same command goes on from there. Whoever starts the job again
    can tell it from a failure. A second signal ends the process at once. `NPUEstimator` has such a hook by itself. With
    several ranks it needs `npu-run`.

    Args:
      leaves: whether the process is left when the session has ended; if not, `was_stopped` tells what has happened.
    Attributes:
      was_stopped: whether the training has ended for it.
      step: the global step after which it has ended; None if it has not, or nothing counts steps.
    Ranks: every rank needs it; nothing is sent.
    Example:
      >>> with MonitoredTrainingSession(checkpoint_dir="out", hooks=[StopHook()]) as session:
    """

    def __init__(self, leaves: bool = True):
        self._leaves = leaves
        self._request = of_this_process()
        self._is_training = False
        self._runs_more = 0
        self._coordinator: tf.train.Coordinator | None = None
        self._heeding = contextlib.ExitStack()
        weakref.finalize(self, self._heeding.close)  # `end` is not called after an error
        self.was_stopped = False
        self.step: int | None = None

    def begin(self):
        self.was_stopped, self.step, self._runs_more = False, None, 0
        self.close()
        self._heeding.enter_context(self._request.heeded(collective.current().size))

    def after_create_session(self, session, coord):
        self._coordinator = coord

    def before_run(self, run_context):
        asked = run_context.original_args
        self._is_training = run_of(run_context.session.graph, asked.fetches, asked.feed_dict).trains
        if self._is_training:
            self._request.begin_run()

    def after_run(self, run_context, run_values):
        if not self._is_training or not self._request.is_due:
            return
        self._runs_more += 1
        if self._runs_more > _MOST_RUNS_MORE or not self._is_within_update(run_context.session):
            self.was_stopped = True
            run_context.request_stop()

    def end(self, session):
        self.close()
        if not self.was_stopped:
            return
        global_step = global_step_of()
        self.step = None if global_step is None else int(session.run(global_step))
        if self._leaves:
            self._leave_after_other_hooks()

    def leave(self):
        """Ends the process with exit code 75."""
        self._request.leave(self.step)

    def _leave_after_other_hooks(self):
        """Some that save may come behind this one; a session raises at its end what its coordinator was told."""
        try:
            self.leave()
        except SystemExit:
            if self._coordinator is None or self._coordinator.should_stop():
                raise
            self._coordinator.request_stop(sys.exc_info())

    def close(self):
        """Leaves signals to whoever had them before; called at the end, and by whoever notices an error."""
        self._heeding.close()

    def _is_within_update(self, session):
        """Whether some optimizer has added up batches that wait for others."""
        counters = [counter for pipeline in pipelines_in(session.graph) for counter in batches_waiting(pipeline)]
        return any(session.run(counters))
