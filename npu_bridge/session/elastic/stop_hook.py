"""`StopHook`: ends the training of a session after a whole step when the job is asked to stop."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Sequence

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base.tf_internals.names import EVALUATING_MODULE
from npu_bridge.gradients.checkpoints.sync import batch_counters
from npu_bridge.gradients.collections import pipelines_in
from npu_bridge.graph.run import run_of_context
from npu_bridge.graph.variables import global_step_of
from npu_bridge.session.elastic.stop_request import WholeUpdates, stop_request_of_process


class StopHook(tf.estimator.SessionRunHook):
    """A hook that ends a training after a step when a scheduler reclaims the machine (SIGTERM) or the job changes size.

    All ranks complete their step and, with `Accumulate`, all batches of the update. Then savers save the state, and the
    process ends with exit code 75. This is not a failure: the same command resumes the training. A second signal ends
    the process at once. An `NPUEstimator` adds this hook by itself. With several ranks the hook needs `npu-run`.

    Args:
      leaves: whether the process exits when the session has ended; with False check `was_stopped` instead.
    Attributes:
      was_stopped: whether this hook has ended the training.
      step: the global step after which this hook has ended the training; None before, or if there is no global step.
    Ranks: every rank needs the hook; it adds no collective.
    Example:
      >>> with MonitoredTrainingSession(checkpoint_dir="out", hooks=[StopHook()]) as session:
    """

    def __init__(self, leaves: bool = True):
        self._leaves = leaves
        self._request = stop_request_of_process()
        self._updates = WholeUpdates()
        self._coordinator: tf.train.Coordinator | None = None
        self._signal_handling = contextlib.ExitStack()
        weakref.finalize(self, self._signal_handling.close)  # `end` is not called after an error
        self.was_stopped = False
        self.step: int | None = None

    def begin(self):
        self.was_stopped, self.step, self._updates = False, None, WholeUpdates()
        self.close()
        self._signal_handling.enter_context(self._request.handle_requests(collective.current().size))

    def after_create_session(self, session, coord):
        self._coordinator = coord

    def before_run(self, run_context):
        if run_of_context(run_context).trains:
            self._request.begin_run()

    def after_run(self, run_context, run_values):
        if not run_of_context(run_context).trains or not self._request.is_due:
            return
        session = run_context.session
        counters = [counter for pipeline in pipelines_in(session.graph) for counter in batch_counters(pipeline)]
        if not self._updates.is_waiting(session.run(counters)):
            self.was_stopped = True
            run_context.request_stop()

    def end(self, session):
        self.close()
        if not self.was_stopped:
            return
        global_step = global_step_of()
        self.step = None if global_step is None else int(session.run(global_step))
        if self._leaves:
            self._exit_after_other_hooks()

    def skip_evaluations(self, listeners: Sequence | None) -> list:
        """Returns listeners of saves of which those of `train_and_evaluate` do nothing after this hook has stopped."""
        return [
            _SkippedAfterStop(self, each) if type(each).__module__ == EVALUATING_MODULE else each
            for each in listeners or ()
        ]

    def end_process(self):
        """Ends the process with exit code 75."""
        self._request.exit_after_save(self.step)

    def _exit_after_other_hooks(self):
        """Makes the session's coordinator raise `SystemExit` only after the `end` of later hooks, such as savers."""
        try:
            self.end_process()
        except SystemExit:
            if self._coordinator is None or self._coordinator.should_stop():
                raise
            self._coordinator.request_stop(sys.exc_info())

    def close(self):
        """Restores the signal handler; called at the end and after an error."""
        self._signal_handling.close()


class _SkippedAfterStop(tf.compat.v1.train.CheckpointSaverListener):
    """A listener of saves that does nothing more once a `StopHook` has ended the training: the time is short."""

    def __init__(self, stop: StopHook, listener: tf.compat.v1.train.CheckpointSaverListener):
        self._stop, self._listener = stop, listener

    def begin(self):
        self._listener.begin()

    def before_save(self, session, global_step_value):
        self._listener.before_save(session, global_step_value)

    def after_save(self, session, global_step_value):
        return None if self._stop.was_stopped else self._listener.after_save(session, global_step_value)

    def end(self, session, global_step_value):
        if not self._stop.was_stopped:
            self._listener.end(session, global_step_value)
