"""Computes the values of hyper-parameters for one update, from numbers, schedules, callables or tensors."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any

from npu_bridge.base.arguments import has_required_argument
from npu_bridge.base.errors import message
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.plain_config import to_python_numbers
from npu_bridge.optimizers.groups import VariableTreatment
from npu_bridge.optimizers.rule import is_number


def compute_hyper_values(
    treatment: VariableTreatment, updates_done: tf.Tensor, dtype: tf.DType, learning_rate: Any = None
) -> types.SimpleNamespace:
    """Returns the values of hyper-parameters for the next update.

    Args:
      updates_done: number of updates so far, an integer scalar; schedules are read at this number.
      dtype: dtype of the results.
      learning_rate: the current rate, if the optimizer class has a rate that can be set; None for the rule's rate.
    Returns:
      An object with an attribute for each hyper-parameter: a scalar tensor, or None for an option that is off. Further
      attributes are `update`, the number of the update counted from 1, and `adapts_layer`, as in `VariableTreatment`.
      Without a weight decay, `weight_decay` is the Python number 0.0, so that no op is made for it.
    """
    rule = treatment.rule
    hypers = types.SimpleNamespace(update=tf.cast(updates_done, dtype) + 1, adapts_layer=treatment.adapts_layer)
    for name in rule.hyper_names():
        value = getattr(rule, name)
        setattr(hypers, name, None if value is None else compute_hyper_value(value, updates_done, dtype))
    if learning_rate is not None:
        hypers.learning_rate = tf.cast(learning_rate, dtype)
    if not (treatment.decays and rule.is_hyper_on("weight_decay")):
        hypers.weight_decay = 0.0
    return hypers


def compute_hyper_value(value: Any, updates_done: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns the value of a hyper-parameter after `updates_done` updates, in whichever form it was given."""
    if callable(value):
        is_schedule = isinstance(value, tf.keras.optimizers.schedules.LearningRateSchedule)
        value = value(updates_done) if is_schedule or has_required_argument(value) else value()
    if is_number(value):
        return tf.constant(float(value), dtype)
    return tf.cast(value, dtype)


def rule_to_config(rule: Any) -> dict:
    """Returns the arguments of a rule as values that JSON can hold.

    Raises:
      ValueError: a hyper-parameter is a callable or a tensor, which cannot be saved.
    """
    return {field.name: _to_json_value(rule, field.name) for field in dataclasses.fields(rule)}


def _to_json_value(rule, name):
    value = to_python_numbers(getattr(rule, name))
    if isinstance(value, tuple):
        return list(value)
    if value is None or isinstance(value, (bool, int, float, str, dict)):
        return value
    problem, expected = f"{name} cannot be written into a configuration", "a number or a LearningRateSchedule"
    got, fix = type(value).__name__, "Give a number or a schedule, or save weights only."
    raise ValueError(message(type(rule).__name__, problem, expected, got, fix))


def rule_arguments_from_config(config: dict, make_schedule: Callable[[dict], Any] | None = None) -> dict:
    """Converts the result of `rule_to_config`, including groups, to arguments of a rule; leaves other keys unchanged.

    `make_schedule` makes a schedule from its configuration; by default a schedule of `tf.keras`.
    """
    make_schedule = make_schedule or tf.keras.optimizers.schedules.deserialize
    schedules = {name: value for name, value in config.items() if isinstance(value, dict) and "class_name" in value}
    made = {name: make_schedule(schedules[name]) for name in schedules}
    if config.get("groups"):
        made["groups"] = [rule_arguments_from_config(group, make_schedule) for group in config["groups"]]
    return {**config, **made}
