"""Defines `StragglerCallback`, which names slow ranks, for which the other ranks wait, in `model.fit`."""

from __future__ import annotations

import sys
import time
import weakref
from typing import Any, TextIO

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base.train_functions import TrainedBatches
from npu_bridge.collective.small_values import gather_values
from npu_bridge.reporting.history import Comparison
from npu_bridge.reporting.keras_numbers import OptimizerNumbers
from npu_bridge.reporting.output import choose_output
from npu_bridge.reporting.stragglers import OwnWorkTimes, compare_ranks, describe_changes

_LATEST: weakref.WeakKeyDictionary[Any, Comparison] = weakref.WeakKeyDictionary()  # by model


class StragglerCallback(tf.keras.callbacks.Callback):
    """A callback that reports slow ranks in `model.fit`, as `StragglerHook` does in a session; a step is a batch.

    `npu_callbacks_append` adds it in jobs of several ranks. A `ReportCallback` shows its results. Ranks are not
    compared if the optimizer is not from this package, in TF 1 graphs, or under a `tf.distribute` strategy.

    Args:
      stream: where rank 0 prints. None: the `sys.stderr` at the time of printing.
    Ranks: collective; every rank needs the callback, at the same place among callbacks with collectives.
    """

    def __init__(self, stream: TextIO | None = None):
        super().__init__()
        self._supports_tf_logs = True  # logs stay tensors: nothing here needs a number
        self._stream = stream
        self._moments: Any = None
        self._work, self._batches = OwnWorkTimes(), TrainedBatches()

    def on_train_begin(self, logs=None):
        """Makes the optimizer record when its reductions begin and end."""
        self._work = OwnWorkTimes()
        watch = getattr(self.model.optimizer, "record_reduction_times", None)
        is_plain = tf.executing_eagerly() and not tf.distribute.has_strategy()
        self._moments = watch() if watch is not None and is_plain and collective.current().size > 1 else None
        if self._moments is not None:
            self._batches.begin_fit(self.model)

    def on_train_batch_end(self, batch, logs=None):
        """Adds up the times of the step; compares the ranks after enough steps."""
        if self._moments is None:
            return
        ready, done = self._moments.numpy().tolist()
        steps = self._batches.count_new()
        own = self._work.add_run(ready, done, steps=steps) if done else None
        if own is not None:
            self._compare_ranks(own)

    def _compare_ranks(self, own_times):
        found = gather_values(own_times, "straggler_times")
        self._work.exclude_time_until(time.time())
        if collective.current().rank > 0:
            return
        before, step = _LATEST.get(self.model), OptimizerNumbers.of(self.model.optimizer).step
        rows, waiting = [row[:-1] for row in found], [row[-1] for row in found]
        now = compare_ranks(step, round(time.time(), 3), rows, waiting, before.slow if before else [])
        _LATEST[self.model] = now
        output = choose_output(self._stream or sys.stderr)
        for text in describe_changes(before, now):
            output.note(f"npu_bridge: {text}")


def latest_comparison_of(model: Any) -> Comparison | None:
    """Returns the latest comparison of ranks by a model's `StragglerCallback`; only rank 0 has one."""
    return _LATEST.get(model)
