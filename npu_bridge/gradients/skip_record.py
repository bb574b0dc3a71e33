"""Counting the steps that were left out."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from npu_bridge.gradients.stage import Stage


class SkipRecord(Stage):
    """Remembers how many steps were skipped, and whether the last one was; changes nothing on the way.

    Args:
      optimizer: a Keras optimizer whose `iterations` is to count skipped steps too; None for updates alone.
    Attributes:
      skipped_steps: int64 scalar variable.
      last_step_skipped: boolean scalar variable.
    """

    place = "record"

    def __init__(self, optimizer: Any = None):
        self._optimizer = optimizer
        with tf.init_scope():
            self.skipped_steps = tf.Variable(0, trainable=False, dtype=tf.int64, name="skipped_steps")
            self.last_step_skipped = tf.Variable(False, trainable=False, name="last_step_skipped")

    def state(self):
        return {"skipped_steps": self.skipped_steps, "last_step_skipped": self.last_step_skipped}

    def after(self, step):
        if step.should_apply is None:
            return None
        return step.run_when_due(lambda: self._note(step.is_skipped()))

    def _note(self, is_skipped):
        counted = self.skipped_steps.assign_add(tf.cast(is_skipped, tf.int64))
        noted = self.last_step_skipped.assign(is_skipped)
        changed = [counted, noted]
        if self._optimizer is not None:
            iterations = self._optimizer.iterations
            changed.append(iterations.assign_add(tf.cast(is_skipped, iterations.dtype)))
        return None if tf.executing_eagerly() else tf.group(*changed)
