"""Defines `AverageMetricsCallback`, which averages metrics over the ranks before other callbacks read them."""

from __future__ import annotations

import logging

import numpy as np
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base.errors import say_once
from npu_bridge.collective.small_values import gather_values, wait_for_ranks
from npu_bridge.session.optimizer_numbers import optimizer_numbers


class AverageMetricsCallback(tf.keras.callbacks.Callback):
    """A callback that averages an epoch's logs over the ranks, validation included, before other callbacks see them.

    So `EarlyStopping`, `ReduceLROnPlateau` and `ModelCheckpoint` decide alike on all ranks, and `History` holds the
    numbers of the job. All ranks have equal weight. A rank that lacks a number gets the mean of the ranks that have the
    number. So rank 0 can validate alone. `npu_callbacks_append` adds the callback in jobs of several ranks.

    The callback also compares the optimizer's hyperparameters between ranks. If they differ, because a callback is
    missing on some ranks, for example, rank 0 warns once. At the end of `fit`, the ranks wait for each other, so that
    each can load the files of rank 0.

    Ranks: collective; give it to every rank, before the callbacks that must see averages.
    """

    def on_epoch_end(self, epoch, logs=None):
        if logs is None or collective.current().size == 1:
            return
        own = {name: float(value) for name, value in logs.items() if np.ndim(value) == 0}
        gathered = gather_values([own, optimizer_numbers(self.model.optimizer)], "average_metrics")
        of_ranks = [logs_of_rank for logs_of_rank, _ in gathered]
        for name in dict.fromkeys(name for each in of_ranks for name in each):
            logs[name] = float(np.mean([each[name] for each in of_ranks if name in each]))

        _warn_of_differences([numbers for _, numbers in gathered])

    def on_train_end(self, logs=None):
        """Waits for the other ranks."""
        wait_for_ranks("end_of_fit")


def _warn_of_differences(metrics_of_ranks):
    """Warns on rank 0 about hyperparameters that differ between ranks; each rank has a dict by name."""
    names = dict.fromkeys(name for each in metrics_of_ranks for name in each)
    values = {name: [each.get(name) for each in metrics_of_ranks] for name in names}
    differing = [f"{name} is {found}" for name, found in values.items() if len(set(map(repr, found))) > 1]
    if differing and collective.current().rank == 0:
        say_once(
            logging.WARNING,
            f"npu_bridge: ranks 0 to {len(metrics_of_ranks) - 1} train with different numbers: {', '.join(differing)}. "
            f"So their weights differ. Give every rank the callbacks that change such numbers, for example "
            f"LearningRateScheduler and ReduceLROnPlateau.",
        )
