"""`PrecisionHook`: brings the precision of a training to sessions that somebody else makes."""

from __future__ import annotations

import tensorflow as tf

from npu_bridge.precision.accelerate import Progress
from npu_bridge.precision.live_session import attach
from npu_bridge.precision.policy import Precision


class PrecisionHook(tf.estimator.SessionRunHook):
    """Attaches every new session of a loop, the ones made after a failure too.

    The settings of these sessions must have gone through `Precision.prepare`. Evaluation and prediction need the hook
    as well when they use the same settings: it keeps the acceleration of a training away from them.

    Args:
      precision: of the training; give the same object to every loop of it.
      is_training: whether the loop is the training. Only it decides what counts as a step: an evaluation may come in
        the middle of it.
      steps, max_steps: how far the loop goes, counted from where it starts or from 0. With either, a step trigger needs
        no variables: while neither `STEP_NOW` nor `TOTAL_STEP` is set, the global step after the last run counts.
    Ranks: local, except that an accelerated training decides together when to switch.
    """

    def __init__(
        self,
        precision: Precision,
        steps: int | None = None,
        max_steps: int | None = None,
        is_training: bool = False,
    ):
        self._precision = precision
        self._is_training = is_training
        self._steps = steps
        self._max_steps = max_steps
        self._global_step = None

    def begin(self):
        """Finds the global step."""
        self._global_step = tf.compat.v1.train.get_global_step()

    def after_create_session(self, session, coord):
        """Attaches the session."""
        del coord
        attach(session, self._precision)
        if self._is_training and self._precision.switch is not None and self._global_step is not None:
            self._precision.switch.count_steps_with(self._counter(session))

    def _counter(self, session):
        if self._max_steps is None and self._steps is None:
            return None
        total = self._max_steps
        if total is None:
            total = int(session.run(self._global_step)) + self._steps
        return lambda: Progress(total, int(session.run(self._global_step)))
