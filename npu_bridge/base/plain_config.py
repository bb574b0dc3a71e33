"""Converts configurations of optimizers for JSON, and checks those of stages."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

from npu_bridge.base.errors import message
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


def check_config(kind: type, config: dict) -> None:
    """Checks that the arguments of a class's constructor are those that its `get_config` returns.

    Args:
      kind: the class; one of the two methods can be inherited.
      config: a result of `get_config`.
    Raises:
      TypeError: `get_config` is inherited, but the constructor has other arguments.
    """
    constructed, described = (
        inspect.signature(next(base for base in kind.__mro__ if name in vars(base)).__init__).parameters
        for name in ("__init__", "get_config")
    )
    takes_any = any(each.kind == each.VAR_KEYWORD for each in constructed.values())
    named = [name for name, each in constructed.items() if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    lost = [name for name in named if name not in described]
    unknown = [] if takes_any else [name for name in config if name not in constructed]
    if lost or unknown:
        problem, got = "get_config does not fit the constructor", f"one with {', '.join(config) or 'nothing'}"
        fix = f"Write get_config in {kind.__name__}: an optimizer copies its stages, and Keras saves them."
        expected = f"a get_config that returns {', '.join(named[1:]) or 'nothing'}"
        raise TypeError(message(kind.__name__, problem, expected, got, fix))
