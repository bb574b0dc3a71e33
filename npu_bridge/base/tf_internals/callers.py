"""Finds out on whose behalf this package is called, by frames of callers. TensorFlow 2.15.1, Keras 2.15 and 3.15."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from npu_bridge.base.tf_internals import keras3
from npu_bridge.base.tf_internals.names import MODEL_OF_ESTIMATOR

if TYPE_CHECKING:
    import tensorflow as tf


def model_in_training() -> tf.keras.Model | None:
    """The model whose `train_step` the caller runs in, or None; optimizers are not told (Keras 2.15)."""
    import tensorflow as tf

    frame = sys._getframe(1)
    while frame is not None:
        model = frame.f_locals.get("self")
        if isinstance(model, tf.keras.Model) or keras3.is_model(model):
            return model
        frame = frame.f_back
    return None


def callbacks_in_training() -> list:
    """Returns the callbacks of the `fit` that the caller is called by (`CallbackList.callbacks`, Keras 2.15 and 3.15).

    They may be changed. A loop of somebody's own has none.
    """
    frame = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if type(caller).__name__ == "CallbackList":
            return caller.callbacks
        frame = frame.f_back
    return []


def builds_evaluation() -> bool:
    """Returns whether an Estimator builds the caller's graph, and not to train it.

    Rank 0 may evaluate alone, and many a model function builds its optimizer even then.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == MODEL_OF_ESTIMATOR:
            return frame.f_locals.get("mode") != "train"
        frame = frame.f_back
    return False
