"""Wraps the train function of a Keras model for several callbacks, which begin and end in any order."""

from __future__ import annotations

import functools
from typing import Any, Callable


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
