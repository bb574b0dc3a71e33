"""Defines the documented loss-scale managers, fixed and dynamic, with their defaults and smallest scales."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import tensorflow as tf

from npu_bridge.base.arguments import check_number, check_switch, is_number
from npu_bridge.base.errors import KeywordChecksMixin, message, shown
from npu_bridge.base.tf_internals.graphs import current_control_flow_context
from npu_bridge.gradients.graph_mode import is_building_graph
from npu_bridge.gradients.scale_rule import LARGEST_SCALE, check_scale, checked_rule
from npu_bridge.gradients.scale_variables import MovingScale

__all__ = ["ExponentialUpdateLossScaleManager", "FixedLossScaleManager", "LossScaleManager"]


class LossScaleManager(KeywordChecksMixin, tf.Module, abc.ABC):
    """The interface of loss-scale managers. Derive from this class to implement your own rule."""

    @abc.abstractmethod
    def get_loss_scale(self) -> tf.Tensor:
        """Returns the scale of the next step, a float32 scalar."""

    @abc.abstractmethod
    def update_loss_scale(self, finite_grads: tf.Tensor) -> Any:
        """Raises or lowers the scale after a step, by the rule of the manager.

        Args:
          finite_grads: boolean scalar, True if all gradients of the step are finite.
        Returns:
          In a TF 1 graph, the op to run; in eager execution, None.
        """

    def agreed_constants(self) -> dict:
        """Returns a dict of named numbers that must be equal on all ranks; otherwise training raises an error."""
        return {}


class _SerializableManager(LossScaleManager):
    """A manager that Keras can save with a model: constructor arguments in the config, state in variables."""

    def get_config(self):
        """Returns the arguments of the constructor."""
        return self.agreed_constants()

    @classmethod
    def from_config(cls, config):
        """Makes a manager from the result of `get_config`."""
        return cls(**config)


@tf.keras.utils.register_keras_serializable(package="npu_bridge")
class FixedLossScaleManager(_SerializableManager):
    """A loss scale that never changes.

    Args:
      loss_scale: the scale, a number of at least 1. A power of two changes no bit of float32 training.
      enable_overflow_check: False makes `NPULossScaleOptimizer` apply every step, even a step with Inf or NaN
        gradients. `NPUOptimizer` ignores this switch and always checks.
    Raises:
      TypeError: `loss_scale` is not a number, or `enable_overflow_check` is not True or False.
      ValueError: `loss_scale` is below 1 or not finite.
    Graph: a float32 constant named `loss_scale`, so that fetching `loss_scale:0` gives the number.
    """

    def __init__(self, loss_scale: float, enable_overflow_check: bool = True):
        super().__init__(name="fixed_loss_scale")
        owner = "FixedLossScaleManager"
        self._value = check_number(owner, "loss_scale", loss_scale, at_least=1, at_most=LARGEST_SCALE)
        self._enable_overflow_check = check_switch(
            owner, "enable_overflow_check", enable_overflow_check, takes_numbers=True
        )
        self._tensor = self._constant()

    def get_loss_scale(self):
        """Returns the fixed scale, a float32 scalar of the current graph."""
        graph = tf.compat.v1.get_default_graph()
        if is_building_graph() and getattr(self._tensor, "graph", None) is graph:
            return self._tensor
        made = self._constant()  # the kept tensor was made eagerly, or in another graph
        if is_building_graph() and current_control_flow_context(graph) is None:
            self._tensor = made  # a tensor made in a function, a condition or a loop cannot be used outside of it
        return made

    def _constant(self):
        return tf.constant(self._value, dtype=tf.float32, name="loss_scale")

    def agreed_constants(self):
        """Returns the arguments of the constructor."""
        return {"loss_scale": self._value, "enable_overflow_check": self._enable_overflow_check}

    def get_enable_overflow_check(self) -> bool:
        """Returns whether `NPULossScaleOptimizer` checks gradients before it applies them."""
        return self._enable_overflow_check

    def set_loss_scale(self, loss_scale, session=None):
        """Raises an error, because the scale is a constant of the graph.

        Raises:
          TypeError: always.
        """
        del session
        problem, expected = "a fixed loss scale cannot be set", f"the scale {self._value:g} of the constructor"
        fix = f"Use npu_bridge.amp.DynamicLossScaleManager.constant({self._value:g}) instead."
        raise TypeError(message("FixedLossScaleManager", problem, expected, shown(loss_scale), fix))

    def update_loss_scale(self, finite_grads):
        """Changes nothing; returns a no-op, or None in eager execution."""
        return None if tf.executing_eagerly() else tf.no_op()


class MovingLossScaleManager(MovingScale, _SerializableManager):
    """Base class of the managers whose scale changes."""


@tf.keras.utils.register_keras_serializable(package="npu_bridge")
class ExponentialUpdateLossScaleManager(MovingLossScaleManager):
    """A loss scale that grows while gradients stay usable and shrinks when they overflow.

    After `incr_every_n_steps` good steps in a row, the scale is multiplied by `incr_ratio`. After
    `decr_every_n_nan_or_inf` bad steps, not necessarily in a row, the scale is multiplied by `decr_ratio`, but not
    below 1. Both events set both counters to 0, even a growth that is omitted because the scale would pass 3.4e38. The
    first steps of a large initial scale overflow by design: this finds the largest usable scale.

    Args:
      init_loss_scale: scale of the first step, at least 1e-37. A value below 1 is kept until the first shrink sets it
        to 1.
      incr_every_n_steps: number of good steps, at least 1. 2**31 or more means never: counters stop at 2**31 - 1.
      decr_every_n_nan_or_inf: number of bad steps, at least 1. 2**31 or more means never.
      incr_ratio: factor of growth, at least 1.
      decr_ratio: factor of shrinking, above 0 and at most 1.
    Raises:
      TypeError: an argument is not a number, or a step count not an integer.
      ValueError: an argument is out of its range.
    Graph: three global variables, saved with the model: `loss_scale` (float32), `good_steps` and `bad_steps` (int32).
      In a TF 1 graph `loss_scale:0` is a tensor that can be fetched. Fetched in a training step, it is the scale that
      this step used; fetched alone, the scale of the next step. The operators of the variable have names below
      `loss_scale`.
    Source: documentation of the NPU stack's loss-scale manager.
    """

    _may_start_below_lowest = True

    def __init__(self, init_loss_scale, incr_every_n_steps, decr_every_n_nan_or_inf=2, incr_ratio=2, decr_ratio=0.8):
        owner = "ExponentialUpdateLossScaleManager"
        first = check_scale(owner, "init_loss_scale", init_loss_scale)
        rule, constants = checked_rule(
            owner,
            incr_every_n_steps=incr_every_n_steps,
            decr_every_n_nan_or_inf=decr_every_n_nan_or_inf,
            incr_ratio=incr_ratio,
            decr_ratio=decr_ratio,
        )
        rule = dataclasses.replace(rule, min_scale=1.0)
        super().__init__("exponential_update_loss_scale", rule, first, {"init_loss_scale": first, **constants})


def manager_code_for_scale(scale: Any) -> str:
    """Returns code that makes a manager for `scale`, a number or "dynamic"; messages suggest this code."""
    if is_number(scale) and len(shown(scale)) < 40:
        return f"FixedLossScaleManager({scale!r})"
    return "ExponentialUpdateLossScaleManager(init_loss_scale=2**16, incr_every_n_steps=1000)"


def advice_for_scale(scale: Any) -> str:
    """Returns the advice for a caller that passes `scale` as `loss_scale`, an argument name of other libraries."""
    return f"Write loss_scale_manager={manager_code_for_scale(scale)}."


def check_manager(owner: str, manager: Any) -> None:
    """Checks that the argument `loss_scale_manager` is a manager or a list of managers.

    Raises:
      ValueError: `manager` is None, or a list that contains a manager twice or a manager with scales for groups.
      TypeError: `manager` is neither a manager nor a list, but a number, for example.
    """
    if isinstance(manager, (list, tuple)) and manager:
        for each in manager:
            check_manager(owner, each)
            if isinstance(each, (list, tuple)) or getattr(each, "is_for_groups", False):
                problem, expected = "a manager in the list has several scales", "one scale for each loss"
                raise ValueError(message(owner, problem, expected, shown(each), "Pass this manager without a list."))
        if len(set(map(id, manager))) < len(manager):
            problem, expected = "two losses share a loss-scale manager", "one manager for each loss"
            fix = "Make one more manager, or pass a single manager for all losses."
            raise ValueError(message(owner, problem, expected, "the same manager twice", fix))
        return
    if hasattr(manager, "update_loss_scale") and hasattr(manager, "get_loss_scale"):
        return
    got = "None" if manager is None else shown(manager)
    problem = "scaling the loss (is_loss_scale) needs a manager as loss_scale_manager"
    expected = "a FixedLossScaleManager or an ExponentialUpdateLossScaleManager"
    fix = "Pass a manager." if manager is None else f"Write {manager_code_for_scale(manager)}."
    raise (ValueError if manager is None else TypeError)(message(owner, problem, expected, got, fix))
