"""Finds the code that called this package, from the stack frames. Seen in TensorFlow 2.15.1, Keras 2.15 and 3.15."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING

from npu_bridge.base.tf_internals import keras3
from npu_bridge.base.tf_internals.names import MODEL_OF_ESTIMATOR

if TYPE_CHECKING:
    import tensorflow as tf


def model_in_training() -> tf.keras.Model | None:
    """Returns the model whose `train_step` or `fit` is running, or None (Keras 2.15)."""
    import tensorflow as tf

    callers = (frame.f_locals.get("self") for frame in _frames())
    return next((each for each in callers if isinstance(each, tf.keras.Model) or keras3.is_model(each)), None)


def callbacks_in_training() -> list:
    """Returns the callbacks of the running `fit` (`CallbackList.callbacks`, Keras 2.15 and 3.15).

    The list is Keras's own, so changes take effect. It is empty in a loop without `fit`.
    """
    callers = (frame.f_locals.get("self") for frame in _frames())
    return next((each.callbacks for each in callers if type(each).__name__ == "CallbackList"), [])


def is_building_evaluation() -> bool:
    """Returns whether an Estimator builds the current graph to evaluate, predict or export.

    Rank 0 can evaluate alone, and many model functions build their optimizer also for evaluation.
    """
    modes = (frame.f_locals.get("mode") for frame in _frames() if frame.f_code.co_name == MODEL_OF_ESTIMATOR)
    return next(modes, "train") != "train"


def is_called_by_keras() -> bool:
    """Returns whether Keras called the function that calls this one (`DataHandler`, Keras 2.15 and 3.15)."""
    return sys._getframe(2).f_globals.get("__name__", "").partition(".")[0] in ("keras", "tf_keras")


def is_being_freed(session: tf.compat.v1.Session) -> bool:
    """Returns whether Python is freeing a session, which closes it (`BaseSession.__del__`, TF 2.15)."""
    freeing = (frame.f_locals.get("self") for frame in _frames() if frame.f_code.co_name == "__del__")
    return any(each is session for each in freeing)


def _frames() -> Iterator[types.FrameType]:
    """Yields the frames of the caller and of its callers, innermost first."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
