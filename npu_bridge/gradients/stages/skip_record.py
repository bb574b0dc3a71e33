"""Counts skipped steps, and warns of a step that is dropped in a training without loss scaling."""

from __future__ import annotations

import logging
from typing import Any

from npu_bridge.base.errors import say_once
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.tf_internals.graphs import is_compiled_by_xla
from npu_bridge.collective.this_process import rank_and_size_of_job
from npu_bridge.gradients.graph_mode import group_in_graph, run_if
from npu_bridge.gradients.stage import Stage
from npu_bridge.gradients.steps.step_report import LastStepReport
from npu_bridge.graph.loop import allow_copies


class SkipRecord(Stage):
    """Counts skipped steps, and records whether the last step was skipped; changes no gradient.

    Args:
      optimizer: a Keras optimizer whose `iterations` is to count skipped steps, too; None to count updates only.
    Attributes:
      skipped_steps: number of skipped steps, an int64 scalar variable.
      last_step_skipped: whether the last step was skipped, a boolean scalar variable.
      report: the loss, overflow and loss scale of the last step.
    """

    place = "record"

    def __init__(self, optimizer: Any = None):
        self._optimizer = optimizer
        self.counts_skipped_steps = optimizer is not None
        self.report = LastStepReport()
        with tf.init_scope():
            self.skipped_steps = tf.Variable(0, trainable=False, dtype=tf.int64, name="skipped_steps")
            self.last_step_skipped = tf.Variable(False, trainable=False, name="last_step_skipped")

    def state(self):
        return {"skipped_steps": self.skipped_steps, "last_step_skipped": self.last_step_skipped}

    def after_update(self, step):
        self.report.record(step)
        if step.should_apply is None:
            return None
        return step.run_when_due(lambda: self._record_skip(step.is_skipped()))

    def _record_skip(self, is_skipped):
        counted = self.skipped_steps.assign_add(tf.cast(is_skipped, tf.int64))
        noted = self.last_step_skipped.assign(is_skipped)
        changed = [counted, noted]
        if self.counts_skipped_steps:
            iterations = self._optimizer.iterations
            changed.append(iterations.assign_add(tf.cast(is_skipped, iterations.dtype)))
        return group_in_graph(*changed)


class DroppedStepWarning(Stage):
    """Warns on rank 0 when the first step is dropped in a training without loss scaling; changes no gradient.

    Skipped steps are normal while a loss scale searches its value, and other code warns if the search fails. Without
    loss scaling, the next step starts from the same variables, and is most likely dropped, too.

    Args:
      words: the text of the warning.
    Graph: a Python operator on every rank that runs in dropped steps only; omitted if XLA compiles the graph.
    """

    place = "record"

    def __init__(self, words: str):
        self._words = words

    def after_update(self, step):
        if step.should_apply is None:
            return None
        if tf.executing_eagerly():
            return self._warn() if bool(step.is_skipped()) else None
        if is_compiled_by_xla(tf.compat.v1.get_default_graph()):
            return None
        return run_if(step.is_skipped(), lambda: allow_copies(tf.numpy_function(self._warn, [], [])))

    def _warn(self):
        if rank_and_size_of_job()[0] == 0:
            say_once(logging.WARNING, self._words)
