"""Converts configurations of optimizers for JSON: numbers of numpy and TensorFlow become Python numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from npu_bridge.base.tf_internals import keras3


def to_python_numbers(value: Any) -> Any:
    """Returns a configuration value in which all numbers are Python numbers, at any depth.

    Args:
      value: a result of `get_config`. Scalars and arrays of numpy, tensors with known values, and variables outside of
        graphs become numbers, or lists of them; schedules become their configurations.
    Returns:
      The converted value; anything else is unchanged.
    """
    import tensorflow as tf

    if isinstance(value, dict):
        return {key: to_python_numbers(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        made = [to_python_numbers(each) for each in value]
        return made if isinstance(value, list) else tuple(made)
    if isinstance(value, tf.keras.optimizers.schedules.LearningRateSchedule):
        return to_python_numbers(tf.keras.optimizers.schedules.serialize(value))
    if keras3.is_schedule(value):
        return to_python_numbers(keras3.load_keras3("schedules").optimizers.schedules.serialize(value))
    if isinstance(value, tf.Variable) and tf.executing_eagerly():
        value = value.numpy()
    elif isinstance(value, tf.Tensor):
        known = tf.get_static_value(value)
        value = value if known is None else known
    return value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value
