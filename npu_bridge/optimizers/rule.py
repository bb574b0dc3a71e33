"""Defines update rules. A rule is a formula with hyper-parameters, independent of where and how it is run.

A rule is a frozen dataclass. Its fields are the constructor's arguments. They are made with `hyper_field`,
`number_field`, `flag_field`, `choice_field` and `patterns_field`, which define the allowed values. The method
`amount_to_subtract` is the formula. The optimizer classes for TF 1 and Keras, updates by variable or on flat buffers,
schedules and parameter groups are all derived from the rule.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any

import numpy as np

from npu_bridge.base.arguments import check_choice, check_list, check_number, check_pattern, check_switch, is_number
from npu_bridge.base.errors import KeywordChecksMixin, message, shown
from npu_bridge.base.own_tensorflow import tf


class TensorReductions:
    """Computes sums and norms of one tensor, for rules that need them; a subclass handles several joined tensors."""

    def sum(self, values: tf.Tensor) -> tf.Tensor:
        """Returns the sum of the elements of each tensor, in a shape that broadcasts to `values`."""
        return tf.reduce_sum(values)

    def norm(self, values: tf.Tensor) -> tf.Tensor:
        """Returns the 2-norm of each tensor, in a shape that broadcasts to `values`."""
        return tf.sqrt(self.sum(tf.square(values)))


ONE_TENSOR = TensorReductions()


def hyper_field(default: float | None, low: float = 0.0, below: float = math.inf, optional: bool = False) -> Any:
    """Defines a hyper-parameter: a number of at least `low` and less than `below`, or a schedule of such numbers.

    Args:
      default: value if the argument is not given; None with `optional=False` makes the argument required.
      low, below: bounds of numbers; values of schedules are not checked.
      optional: whether None is allowed; None turns the option off.
    """
    missing = default is None and not optional
    return _make_checked_field(
        default, _check_hyper, low=low, below=below, optional=optional, is_hyper=True, is_required=missing
    )


def number_field(default: float | None, low: float = 0.0, optional: bool = False) -> Any:
    """Defines a number of at least `low` that is the same in all updates; with `optional`, None is allowed, too."""
    return _make_checked_field(default, _check_number, low=low, below=math.inf, optional=optional)


def flag_field(default: bool) -> Any:
    """Defines an argument that is True or False."""
    return _make_checked_field(default, _check_flag)


def choice_field(default: str, *others: str) -> Any:
    """Defines an argument that is one of a few strings."""
    return _make_checked_field(default, _check_choice, choices=(default, *others))


def patterns_field() -> Any:
    """Defines an argument that is None or a list of regular expressions that are searched for in variable names."""
    return _make_checked_field(None, _check_patterns)


class Rule(KeywordChecksMixin, abc.ABC):
    """A formula that turns a gradient into the amount to subtract from a parameter.

    Every rule has the fields `learning_rate`, `weight_decay`, `decay` and `exclude_from_weight_decay`. With
    `decay="coupled"`, `weight_decay * parameter` is first added to the gradient; with "decoupled",
    `learning_rate * weight_decay * parameter` is also subtracted from the parameter itself. A rule can define other
    values of `decay`.
    """

    learning_rate: Any
    weight_decay: Any
    decay: str
    exclude_from_weight_decay: Any
    # False for a rule that needs shapes for more than the sums of `TensorReductions`: it cannot run on flat buffers.
    is_elementwise_or_norms = True
    # True for a rule that needs sums over whole tensors. Only variables of the same size are then joined.
    uses_norms = False

    def __post_init__(self):
        for field in dataclasses.fields(self):
            check = field.metadata["check"]
            object.__setattr__(self, field.name, check(type(self).__name__, field, getattr(self, field.name)))
        self.check()

    def check(self) -> None:  # noqa: B027 - most rules have arguments that do not depend on each other
        """Raises ValueError if arguments contradict each other."""

    @classmethod
    def hyper_names(cls) -> list:
        """Returns the names of the arguments that can be schedules."""
        fields = dataclasses.fields(cls)  # type: ignore[arg-type]  # every rule is a dataclass
        return [field.name for field in fields if field.metadata.get("is_hyper")]

    def is_hyper_on(self, name: str) -> bool:
        """Returns False if a hyper-parameter is None or 0 in all updates. Schedules are on: they can take any value."""
        value = getattr(self, name)
        return value is not None and not (isinstance(value, float) and value == 0.0)

    def slots(self) -> dict:
        """Returns the names of the slots of each parameter, with the initial value of their elements."""
        return {}

    @property
    def uses_global_norm(self) -> bool:
        """True if gradients are first multiplied by a factor that depends on the norm of all gradients."""
        return False

    def gradient_factor(self, global_norm: tf.Tensor) -> tf.Tensor:
        """Returns the factor for all gradients; called only if `uses_global_norm`."""
        raise NotImplementedError

    @abc.abstractmethod
    def amount_to_subtract(self, parameter, gradient, slots: dict, hypers, tensors: TensorReductions) -> tuple:
        """Returns the amount to subtract from the parameter, and the new slots.

        Args:
          parameter, gradient: float32 or float64 tensors of one shape.
          slots: tensors of the parameter's shape by slot name.
          hypers: the hyper-parameters of this update as attributes, scalars of the parameter's dtype; `hypers.update`
            counts updates from 1.
          tensors: computes sums and norms of whole tensors.
        """

    def amount_with_decay(
        self, parameter, gradient, slots: dict, hypers, tensors: TensorReductions = ONE_TENSOR
    ) -> tuple:
        """Returns the amount to subtract, with the weight decay, and the new slots.

        The arguments are as for `amount_to_subtract`.
        """
        decays = self.has_weight_decay(hypers)
        if decays and self.decay == "coupled":
            gradient = gradient + hypers.weight_decay * parameter
        amount, new_slots = self.amount_to_subtract(parameter, gradient, slots, hypers, tensors)
        if decays and self.decay == "decoupled":
            amount = amount + hypers.learning_rate * hypers.weight_decay * parameter
        elif decays and self.decay == "decoupled_unscaled":
            amount = amount + hypers.weight_decay * parameter
        return amount, new_slots

    @property
    def reads_parameter(self) -> bool:
        """True if the amount depends on the parameter itself."""
        return self.is_hyper_on("weight_decay")

    def has_weight_decay(self, hypers) -> bool:
        """Returns whether this update has a weight decay. If not, `hypers.weight_decay` is the Python number 0.0."""
        return not (isinstance(hypers.weight_decay, float) and hypers.weight_decay == 0.0)


def _make_checked_field(default, check, **metadata):
    return dataclasses.field(default=default, metadata={"check": check, **metadata})


def is_schedule(value: Any) -> bool:
    """Returns True for values that can change from update to update: schedules, callables, tensors and variables."""
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
        problem, got = f"{field.name} cannot change between updates", type(value).__name__
        raise TypeError(message(owner, problem, "a number", got, "Give a number."))
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
