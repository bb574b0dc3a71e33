"""Reports an evaluation: prints one line, adds an entry to the history, and rewrites the page."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base.secondary_files import NonFatalOutput
from npu_bridge.reporting import page
from npu_bridge.reporting.history import HISTORY_FILE, Evaluation, History
from npu_bridge.reporting.output import choose_output
from npu_bridge.reporting.progress_line import format_evaluation


class BatchesHook(tf.estimator.SessionRunHook):
    """A hook that counts the batches of an evaluation, and the seconds from its first batch to its last.

    Attributes:
      batches, secs: number of batches and duration of the latest evaluation.
    """

    def __init__(self):
        self.batches, self.secs = 0, 0.0

    def after_create_session(self, session, coord):
        """Starts counting."""
        self.batches, self._began = 0, time.monotonic()

    def after_run(self, run_context, run_values):
        """Counts a batch."""
        self.batches += 1
        self.secs = time.monotonic() - self._began


def report_evaluation(
    folder: str,
    metrics: Mapping[str, Any],
    history: History | None = None,
    name: str | None = None,
    counted: BatchesHook | None = None,
    stream: TextIO | None = None,
    is_over: bool = True,
) -> None:
    """Prints the results of an evaluation, and adds them to the history and the page of its training.

    An `NPUEstimator` calls this function by itself.

    Args:
      folder: folder of the training.
      metrics: the result of `evaluate`, with `global_step`.
      history: history of the training. None: the history in the folder, if there is one.
      name: name of the evaluation.
      counted: a hook that was passed to `evaluate`.
      stream: where to print. None: the current `sys.stdout`.
      is_over: whether the training is over; during a training, the page is not rewritten.
    Ranks: local; only rank 0 does anything.
    """
    if collective.current().rank > 0 or "global_step" not in metrics:
        return
    path = os.path.join(folder, HISTORY_FILE) if history is None else history.path
    if history is None and os.path.exists(path):
        history = History(path)
    batches, secs = (None, None) if counted is None else (counted.batches, counted.secs)
    step = int(metrics["global_step"])
    if history is None:
        done = Evaluation.of(step, metrics, name or "", batches, secs, time.time())
    else:
        done = history.append_evaluation(step, metrics, name or "", batches, secs)
    output = choose_output(sys.stdout if stream is None else stream)
    output.note(format_evaluation(done, output.width))
    if is_over and history is not None and os.path.exists(os.path.join(folder, page.PAGE_FILE)):
        secondary = NonFatalOutput(f"the page of this training in {folder}", (Exception,))
        secondary.attempt(lambda: page.write_page(folder, history=history))
