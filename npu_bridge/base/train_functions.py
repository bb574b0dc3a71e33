"""Wraps the train function of a Keras model for several callbacks, which begin and end in any order."""

from __future__ import annotations

import functools
from typing import Any, Callable

from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.tf_internals.training import steps_per_execution


class _CountingStep:
    """A train step that counts its batches."""

    def __init__(self, step: Callable):
        self.batches, self._step = tf.Variable(0, trainable=False, dtype=tf.int64), step

    def __call__(self, data: Any) -> Any:
        self.batches.assign_add(1)
        return self._step(data)


class TrainedBatches:
    """A counter of the batches on which `fit` trains a model.

    The last execution of several steps can be shorter, but Keras 3 tells callbacks the number of batches of a whole
    one. So the train step itself counts; under a strategy of several devices, each execution counts as a whole one.
    """

    def __init__(self):
        self._counter, self._seen, self._whole = None, 0, 1

    def begin_fit(self, model: Any) -> None:
        """Counts the batches of a model from now on; to be called after Keras has made the train function."""
        self._counter, self._whole = None, steps_per_execution(model)
        # Keras 2 begins with 1, and later chooses another number, if it is to choose.
        is_single = self._whole == 1 and not getattr(model, "autotune_steps_per_execution", False)
        if is_single or model.distribute_strategy.num_replicas_in_sync > 1:
            return
        if not isinstance(model.train_step, _CountingStep):
            model.train_step = _CountingStep(model.train_step)
            renew_train_function(model)
        self._counter = model.train_step.batches
        self._seen = int(self._counter.numpy())

    def count_new(self) -> int:
        """Returns the number of batches since the last call, at the end of an execution."""
        if self._counter is None:
            return self._whole
        before, self._seen = self._seen, int(self._counter.numpy())
        return self._seen - before


class _WrappedFunction:
    """A train function, and the functions around it, the outermost last."""

    def __init__(self, function: Callable):
        self.function, self.around = function, []  # type: ignore[var-annotated]

    def __call__(self, iterator: Any) -> Any:
        call = self.function
        for around in self.around:
            call = functools.partial(around, call)
        return call(iterator)


def wrap_train_function(model: Any, around: Callable[[Callable, Any], Any]) -> None:
    """Makes a model call `around(train_function, iterator)` in each step, until `unwrap_train_function`."""
    unwrap_train_function(model, around)  # left by a fit that failed
    if not isinstance(model.train_function, _WrappedFunction):
        model.train_function = _WrappedFunction(model.train_function)
    model.train_function.around.append(around)


def renew_train_function(model: Any) -> None:
    """Makes a model's train function anew, so that the next step compiles it; keeps the functions around it."""
    before = model.train_function
    made = model.make_train_function(force=True)
    if made is not None:  # Keras 3 returns nothing; amp returns a function around the one that Keras 2 has stored
        model.train_function = made
    if isinstance(before, _WrappedFunction):
        before.function, model.train_function = model.train_function, before


def unwrap_train_function(model: Any, around: Callable[[Callable, Any], Any]) -> None:
    """Ends `wrap_train_function`; does nothing for a function that wraps nothing."""
    wrapped = getattr(model, "train_function", None)
    if isinstance(wrapped, _WrappedFunction) and around in wrapped.around:
        wrapped.around.remove(around)
        if not wrapped.around:
            model.train_function = wrapped.function
