"""A trial's callback for `model.fit`: history, initial weights changed by a rounding, the end after some batches."""

from __future__ import annotations

import os

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.launch.trials.hooks import rounded_otherwise
from npu_bridge.launch.trials.trial import Trial
from npu_bridge.reporting.history import HISTORY_FILE, History
from npu_bridge.reporting.keras_numbers import Numbers


class CallbackOfTrial(tf.keras.callbacks.Callback):
    """Does for a `fit` what the hooks of a trial do for sessions. The loss is the one that Keras shows.

    Ranks: local; only rank 0 writes.
    """

    def __init__(self, trial: Trial):
        super().__init__()
        self._trial = trial
        self._history = History(os.path.join(trial.folder, HISTORY_FILE)) if trial.folder else None
        self._has_begun, self._has_rounded, self._writes, self._batches = False, False, False, 0

    def on_train_begin(self, logs=None):
        if not self._has_begun and self._history is not None:
            ranks = collective.current()
            self._writes = ranks.rank == 0 and not os.path.exists(self._history.path)
            if self._writes:
                self._history.begin_session(Numbers.of(self.model.optimizer).step, ranks=ranks.size)
        self._has_begun = True

    def on_train_batch_begin(self, batch, logs=None):
        if self._trial.rounding and not self._has_rounded and self.model.built:
            self._round_weights()

    def _round_weights(self):
        self._has_rounded = True
        weights = self.model.trainable_weights
        values = tf.keras.backend.batch_get_value(weights)
        changed = [rounded_otherwise(value, self._trial.rounding, str(number)) for number, value in enumerate(values)]
        tf.keras.backend.batch_set_value(list(zip(weights, changed)))

    def on_train_batch_end(self, batch, logs=None):
        self._batches += 1
        if self._trial.rounding and not self._has_rounded:
            self._round_weights()  # this model had no weights before its first batch
        if self._writes:
            numbers, loss = Numbers.of(self.model.optimizer), (logs or {}).get("loss")
            self._history.append(numbers.step, None if loss is None else float(loss), numbers.loss_scale, False)
        if self._batches == self._trial.steps:
            raise SystemExit(0)
