"""`AverageMetricsCallback`: callbacks that decide by the metrics of an epoch see those of all ranks."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.collective.exchanges import gather_values, wait_for_ranks


class AverageMetricsCallback(tf.keras.callbacks.Callback):
    """Averages the logs of each epoch over the ranks, validation included, before other callbacks see them.

    So `EarlyStopping`, `ReduceLROnPlateau` and `ModelCheckpoint` decide alike on all ranks, and `History` holds the
    numbers of the job. Each rank counts as much as any other. A rank that lacks a number gets that of the ranks that
    have it, so that rank 0 alone may validate. `npu_callbacks_append` adds the callback on several ranks.

    At the end of `fit` the ranks wait for each other, so that any of them may load what rank 0 has saved.

    Ranks: collective; give it to every rank, before the callbacks that are to see averages.
    """

    def on_epoch_end(self, epoch, logs=None):
        if logs is None or collective.current().size == 1:
            return
        own = {name: float(value) for name, value in logs.items() if np.ndim(value) == 0}
        of_ranks = gather_values(own, "average_metrics")
        for name in dict.fromkeys(name for each in of_ranks for name in each):
            logs[name] = float(np.mean([each[name] for each in of_ranks if name in each]))

    def on_train_end(self, logs=None):
        """Waits for the other ranks."""
        wait_for_ranks("end_of_fit")
