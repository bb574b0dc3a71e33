"""Defines an update rule: a formula with its hyper-parameters, independent of where and how it is run.

A rule is a frozen dataclass. Its fields are the constructor's arguments, made with `hyper`, `number`, `flag`,
`choice` and `patterns`, which define the allowed values. Its `amount` is the formula. The optimizer classes for TF 1
and Keras, execution by variable or on flat buffers, schedules and parameter groups are derived from it.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any

import numpy as np

from npu_bridge.base.arguments import check_choice, check_list, check_number, check_pattern, check_switch, is_number
from npu_bridge.base.errors import KnownKeywords, message, shown
from npu_bridge.base.own_tensorflow import tf


class PerTensor:
    """Sums over tensors, for rules that treat each tensor as a whole; in this class there is one tensor."""

    def sum(self, values: tf.Tensor) -> tf.Tensor:
        """Returns the sum over each tensor's elements, in a shape that broadcasts against `values`."""
        return tf.reduce_sum(values)

    def norm(self, values: tf.Tensor) -> tf.Tensor:
        """Returns the 2-norm of each tensor, in a shape that broadcasts against `values`."""
        return tf.sqrt(self.sum(tf.square(values)))


ONE_TENSOR = PerTensor()


def hyper(default: float | None, low: float = 0.0, below: float = math.inf, optional: bool = False) -> Any:
    """Defines a hyper-parameter: a number of at least `low` and less than `below`, or a schedule of numbers.

    Args:
      default: value when none is given; None with `optional=False` makes the argument required.
      low, below: bounds. Schedules are not checked.
      optional: whether None is allowed, which turns the option off.
    """
    missing = default is None and not optional
    return _field(default, _check_hyper, low=low, below=below, optional=optional, is_hyper=True, is_required=missing)


def number(default: float | None, low: float = 0.0, optional: bool = False) -> Any:
    """Defines a number of at least `low` that is the same in all updates; None is allowed where it is `optional`."""
    return _field(default, _check_number, low=low, below=math.inf, optional=optional)


def flag(default: bool) -> Any:
    """Defines an argument that is True or False."""
    return _field(default, _check_flag)


def choice(default: str, *others: str) -> Any:
    """Defines an argument that is one of a few words."""
    return _field(default, _check_choice, choices=(default, *others))


def patterns() -> Any:
    """Defines an argument that is None or a list of regular expressions, searched for in names of variables."""
    return _field(None, _check_patterns)


class Rule(KnownKeywords, abc.ABC):
    """A formula that turns a gradient into the amount that a parameter is lowered by.

    Every rule has the fields `learning_rate`, `weight_decay`, `decay` and `exclude_from_weight_decay`. With
    `decay="coupled"`, `weight_decay * parameter` is added to the gradient first; with "decoupled", the parameter is
    also lowered by `learning_rate * weight_decay * parameter`. A rule can define more.
    """

    learning_rate: Any
    weight_decay: Any
    decay: str
    exclude_from_weight_decay: Any
    # False for a rule that needs more of a tensor's shape than `PerTensor` offers: it cannot run on flat buffers.
    is_elementwise_or_norms = True
    # True for a rule that needs sums over whole tensors; variables are then joined only with those of their size.
    uses_norms = False

    def __post_init__(self):
        for field in dataclasses.fields(self):
            check = field.metadata["check"]
            object.__setattr__(self, field.name, check(type(self).__name__, field, getattr(self, field.name)))
        self.check()

    def check(self) -> None:  # noqa: B027 - most rules have arguments that do not depend on each other
        """Raises ValueError when arguments contradict each other."""

    @classmethod
    def hyper_names(cls) -> list:
        """Returns the names of the arguments that can be schedules."""
        fields = dataclasses.fields(cls)  # type: ignore[arg-type]  # every rule is a dataclass
        return [field.name for field in fields if field.metadata.get("is_hyper")]

    def is_on(self, name: str) -> bool:
        """Returns False when a hyper-parameter is 0 for the whole run; a schedule can take any value, so it is on."""
        value = getattr(self, name)
        return value is not None and not (isinstance(value, float) and value == 0.0)

    def slots(self) -> dict:
        """Returns the names of the values kept for each parameter, with the start of their elements."""
        return {}

    @property
    def uses_global_norm(self) -> bool:
        """True when gradients are first multiplied by a factor that depends on the norm of all of them."""
        return False

    def gradient_factor(self, global_norm: tf.Tensor) -> tf.Tensor:
        """Returns the factor for all gradients, where `uses_global_norm`."""
        raise NotImplementedError

    @abc.abstractmethod
    def amount(self, parameter, gradient, slots: dict, at, tensors: PerTensor) -> tuple:
        """Returns the amount to subtract from the parameter, and the new slots.

        Args:
          parameter, gradient: float32 or float64 tensors of one shape.
          slots: tensors of that shape by name.
          at: the hyper-parameters of this update by name, scalars of that dtype; `at.update` counts updates from 1.
          tensors: sums over whole tensors.
        """

    def updated(self, parameter, gradient, slots: dict, at, tensors: PerTensor = ONE_TENSOR) -> tuple:
        """Returns `amount` with the weight decay; the arguments and results are the same."""
        decays = self.decays(at)
        if decays and self.decay == "coupled":
            gradient = gradient + at.weight_decay * parameter
        amount, new_slots = self.amount(parameter, gradient, slots, at, tensors)
        if decays and self.decay == "decoupled":
            amount = amount + at.learning_rate * at.weight_decay * parameter
        elif decays and self.decay == "decoupled_unscaled":
            amount = amount + at.weight_decay * parameter
        return amount, new_slots

    @property
    def reads_parameter(self) -> bool:
        """True when the amount depends on the parameter itself."""
        return self.is_on("weight_decay")

    def decays(self, at) -> bool:
        """Returns True when a weight decay is part of this update; without one `values_at` returns the number 0.0."""
        return not (isinstance(at.weight_decay, float) and at.weight_decay == 0.0)


def _field(default, check, **metadata):
    return dataclasses.field(default=default, metadata={"check": check, **metadata})


def is_schedule(value: Any) -> bool:
    """Returns True for values that can change with each update: schedules, callables, tensors and variables."""
    return callable(value) or isinstance(value, (tf.Tensor, tf.Variable)) or hasattr(value, "handle")


def _check_hyper(owner, field, value):
    metadata = field.metadata
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value.item()
    if value is None and metadata["optional"]:
        return None
    if is_number(value):
        return check_number(owner, field.name, value, at_least=metadata["low"], below=metadata["below"])
    if is_schedule(value):
        return value
    problem = f"{field.name} is of the wrong type"
    expected = "a number, a tf.keras.optimizers.schedules.LearningRateSchedule, a callable or a tensor"
    raise TypeError(message(owner, problem, expected, shown(value), "Give a number such as 0.1."))


def _check_number(owner, field, value):
    if is_schedule(value):
        problem, got = f"{field.name} is the same in all updates", type(value).__name__
        raise TypeError(message(owner, problem, "a number", got, "Give one."))
    return _check_hyper(owner, field, value)


def _check_flag(owner, field, value):
    return check_switch(owner, field.name, value)


def _check_choice(owner, field, value):
    return check_choice(owner, field.name, value, field.metadata["choices"])


def _check_patterns(owner, field, value):
    if value is None:
        return None
    what = "a list of regular expressions that are searched for in names of variables"
    given = [value] if isinstance(value, str) else check_list(owner, field.name, value, "Write [...].", expected=what)
    return tuple(check_pattern(owner, field.name, pattern) for pattern in given)
