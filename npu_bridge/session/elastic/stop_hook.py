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

# An update of several batches is completed first; if it takes more runs than this, it is saved incomplete.
_MOST_RUNS_MORE = 1000


class StopHook(tf.estimator.SessionRunHook):
    """A hook that ends a training in order when a scheduler reclaims the machine (SIGTERM) or the job changes size.

    All ranks complete their step, and all batches of an update (`Accumulate`), savers save it, and the process ends
    with exit code 75: not a failure, the same command resumes the training. A second signal ends the process at once.
    `NPUEstimator` has such a hook by itself. With several ranks it needs `npu-run`.

    Args:
      leaves: whether the process exits when the session has ended; if not, see `was_stopped`.
    Attributes:
      was_stopped: whether this hook has ended the training.
      step: the global step after which it has ended; None if it has not, or without a global step.
    Ranks: every rank needs it; it adds no collective.
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
        """Passes the exit to the session's coordinator, which raises it after later hooks, such as savers."""
        try:
            self.leave()
        except SystemExit:
            if self._coordinator is None or self._coordinator.should_stop():
                raise
            self._coordinator.request_stop(sys.exc_info())

    def close(self):
        """Restores the handling of signals; called at the end and after an error."""
        self._heeding.close()

    def _is_within_update(self, session):
        """Returns whether an optimizer has accumulated batches of an incomplete update."""
        counters = [counter for pipeline in pipelines_in(session.graph) for counter in batches_waiting(pipeline)]
        return any(session.run(counters))
