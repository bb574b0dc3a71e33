"""Reads step, loss scale, skipped steps and learning rate from a Keras optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from npu_bridge.base.tf_internals import keras3
from npu_bridge.reporting.history import is_number


class OptimizerNumbers(NamedTuple):
    """The numbers of an optimizer; None for a number that the optimizer does not have.

    Attributes:
      step: updates so far.
      loss_scale: the loss scale of the next step; of several losses or groups, the smallest.
      skipped_steps: skipped steps so far.
      learning_rate: learning rate of the next step.
    """

    step: int
    loss_scale: float | None
    skipped_steps: float | None
    learning_rate: float | None

    @classmethod
    def of(cls, optimizer) -> OptimizerNumbers:
        """Reads the numbers of a Keras optimizer, which can be wrapped."""
        rate = getattr(optimizer, "learning_rate", None)  # Keras wraps a `tf.train` optimizer without one
        if isinstance(rate, tf.keras.optimizers.schedules.LearningRateSchedule):
            rate = rate(optimizer.iterations)
        return cls(
            int(tf.keras.backend.get_value(optimizer.iterations)),
            _as_float(getattr(optimizer, "loss_scale", None)),
            _as_float(getattr(optimizer, "skipped_steps", None)),
            _as_float(rate),
        )


class FittedSteps:
    """Reads the numbers of a model's optimizer in several calls of `fit`.

    A model that is compiled again has a new optimizer, whose steps are counted on: it is the same training. Of a model
    with optimizers of its own, such as a GAN, the optimizer with most updates counts.
    """

    def __init__(self):
        self._model = self._optimizer = None
        self._before = self._latest = 0  # steps: of earlier optimizers, and up to now

    def begin(self, model) -> OptimizerNumbers:
        """Begins a call of `fit` and returns the numbers. An optimizer with steps was restored, and keeps them."""
        optimizer = most_used_optimizer(model)
        if optimizer is not self._optimizer:
            is_next = model is self._model and OptimizerNumbers.of(optimizer).step == 0
            self._before = self._latest if is_next else 0
        self._model, self._optimizer = model, optimizer
        return self.read()

    def read(self) -> OptimizerNumbers:
        """Returns the optimizer's numbers, with the steps of earlier optimizers of the model."""
        numbers = OptimizerNumbers.of(self._optimizer)
        if not numbers.step:  # perhaps another optimizer makes the updates
            self._optimizer = most_used_optimizer(self._model)
            numbers = OptimizerNumbers.of(self._optimizer)
        self._latest = self._before + numbers.step
        return numbers._replace(step=self._latest)


def most_used_optimizer(model: Any) -> Any:
    """Returns the optimizer of a model with most updates; a GAN, for example, has optimizers of its own."""
    kinds = (tf.keras.optimizers.Optimizer, tf.keras.optimizers.legacy.Optimizer)
    own = [each for each in vars(model).values() if isinstance(each, kinds) or keras3.is_optimizer(each)]
    return max([model.optimizer, *own], key=lambda each: int(tf.keras.backend.get_value(each.iterations)))


class FirstEpochCallback(tf.keras.callbacks.Callback):
    """Base class of callbacks that read the optimizer's step when `fit` begins: they begin with its first epoch.

    Before, in `on_train_begin`, another callback such as Keras' `BackupAndRestore` can still restore the model.

    Attributes:
      ends_with_process: True, so that `ResumeCallback` calls `on_train_end` before it ends the process within `fit`.
    """

    ends_with_process = True
    _has_begun = False

    def begin(self) -> None:
        """Begins a `fit`, in which no batch has been trained yet."""

    def on_train_begin(self, logs=None):
        """Makes the first epoch begin this `fit`."""
        self._has_begun = False

    def on_epoch_begin(self, epoch, logs=None):
        """Begins the `fit` in its first epoch."""
        self._begin_once()

    def on_train_batch_begin(self, batch, logs=None):
        """Begins the `fit` in a loop of the script's own that calls no hook of epochs."""
        self._begin_once()

    def on_train_end(self, logs=None):
        """Begins a `fit` without an epoch, so that it can end."""
        self._begin_once()

    def _begin_once(self):
        if not self._has_begun:
            self._has_begun = True
            self.begin()


def numbers_in(logs: Mapping[str, Any] | None) -> dict[str, float]:
    """Returns the metrics that are single numbers; others, such as the F1 score of each class, cannot be drawn."""
    return {name: value for name, value in (logs or {}).items() if is_number(value)}


def split_training_and_validation(logs: Mapping[str, float] | None) -> tuple[dict[str, float], dict[str, float]]:
    """Splits the logs of an epoch into numbers of training and numbers of validation, without the prefix `val_`.

    Leaves out metrics that are not single numbers.
    """
    found: tuple[dict[str, float], dict[str, float]] = {}, {}
    for name, value in numbers_in(logs).items():
        found[name.startswith("val_")][name.removeprefix("val_")] = value
    return found


def _as_float(value) -> float | None:
    return None if value is None else float(np.min(tf.keras.backend.get_value(value)))
