"""Defines hooks that apply mixed precision to new sessions, and that show in TensorBoard when precision is low."""

from __future__ import annotations

import tensorflow as tf

from npu_bridge.base.arguments import check_count
from npu_bridge.gradients.checkpoints.sync import batches_per_update_in
from npu_bridge.graph.variables import global_step_of
from npu_bridge.session.precision.accelerate import TrainingProgress
from npu_bridge.session.precision.live_session import attach_precision, policy_of_last_step
from npu_bridge.session.precision.policy import Precision


class PrecisionHook(tf.estimator.SessionRunHook):
    """A hook that applies mixed precision to every new session of a loop, also after a failure.

    The settings of these sessions must have gone through `Precision.prepare`. Evaluation and prediction also need the
    hook if they use the same settings; otherwise the acceleration of a training affects them.

    Args:
      precision: the precision of the training; give the same object to every loop of the training.
      is_training: whether the loop trains. Only runs of such a loop count as steps; an evaluation can come in the
        middle of the training.
      steps, max_steps: the number of steps of the loop, or the global step at which the loop ends. With either
        argument, a step trigger needs no environment variables: if neither `STEP_NOW` nor `TOTAL_STEP` is set, the
        global step is used.
    Ranks: local, except that the ranks of an accelerated training decide together when to switch.
    """

    def __init__(
        self, precision: Precision, steps: int | None = None, max_steps: int | None = None, is_training: bool = False
    ):
        self._precision = precision
        self._is_training = is_training
        self._steps = steps
        self._max_steps = max_steps
        self._global_step = None

    def begin(self):
        """Finds the global step, and adds rounding to the graph before a session runs it, if needed."""
        self._global_step = global_step_of()
        graph = tf.compat.v1.get_default_graph()
        if self._is_training and self._precision.switch is not None:
            self._precision.switch.set_batches_per_step(batches_per_update_in(graph))
        self._precision.round_new_operators(graph)

    def after_create_session(self, session, coord):
        """Attaches the session to the precision."""
        del coord
        attach_precision(session, self._precision)
        if self._is_training and self._precision.switch is not None and self._global_step is not None:
            self._precision.switch.set_step_fallback(self._progress_counter(session))

    def _progress_counter(self, session):
        if self._max_steps is None and self._steps is None:
            return None
        total = self._max_steps
        if total is None:
            total = int(session.run(self._global_step)) + self._steps
        return lambda: TrainingProgress(total, int(session.run(self._global_step)))


class PrecisionSummaryHook(tf.estimator.SessionRunHook):
    """A hook that writes the scalar `precision/is_low` for TensorBoard: 1 for a training in low precision, else 0.

    The scalar is written in the first run, in every n-th run, and when its value changes; only for sessions that follow
    a precision.

    Args:
      summary_dir: folder of the event files, which can be that of an Estimator.
      every_n_steps: runs between two entries, at least 1.
    Raises:
      ValueError: `every_n_steps` is below 1.
    Ranks: local. Give it to rank 0 only.
    """

    TAG = "precision/is_low"

    def __init__(self, summary_dir: str, every_n_steps: int = 100):
        fix = "Pass the steps between two summaries."
        check_count("PrecisionSummaryHook", "every_n_steps", every_n_steps, fix)
        self._summary_dir = summary_dir
        self._every_n_steps = every_n_steps
        self._global_step = None
        self._runs = 0
        self._shown: bool | None = None

    def begin(self):
        """Finds the global step."""
        self._global_step = global_step_of()
        self._runs, self._shown = 0, None

    def after_run(self, run_context, run_values):
        """Writes the scalar if it is due."""
        policy = policy_of_last_step(run_context.session)
        if policy is None or self._global_step is None:
            return
        is_low = policy.low_dtype is not None
        if is_low != self._shown or self._runs % self._every_n_steps == 0:
            value = tf.compat.v1.Summary.Value(tag=self.TAG, simple_value=float(is_low))
            writer = tf.compat.v1.summary.FileWriterCache.get(self._summary_dir)
            writer.add_summary(tf.compat.v1.Summary(value=[value]), run_context.session.run(self._global_step))
        self._runs, self._shown = self._runs + 1, is_low

    def end(self, session):
        """Flushes the event file."""
        del session
        if self._shown is not None:
            tf.compat.v1.summary.FileWriterCache.get(self._summary_dir).flush()
