"""Defines the documented loss-scale managers, fixed and dynamic, with their defaults and smallest scales."""

from __future__ import annotations

import abc
import functools
import weakref
from typing import Any

import numpy as np
import tensorflow as tf

from npu_bridge.base import kept_in_graph
from npu_bridge.base.arguments import check_count, check_number, check_switch, is_number
from npu_bridge.base.errors import KeywordChecksMixin, message, shown
from npu_bridge.base.tf_internals.graphs import current_control_flow_context
from npu_bridge.gradients.graph_mode import is_building_graph
from npu_bridge.gradients.loss_scale_rule import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    ScaleRule,
    ScaleState,
    ScaleVariables,
    check_backoff,
    check_growth,
    check_scale,
    make_scale_variables,
    read_values,
    write_values,
)

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


# By manager: its variables in eager execution, if it was made in a graph.
_eager_variables: weakref.WeakKeyDictionary[Any, ScaleVariables] = weakref.WeakKeyDictionary()
_COLLECTION = ("npu_bridge", "variables_of_scales")  # the same in a graph


def _variables_in(graph: weakref.ref | None) -> weakref.WeakKeyDictionary[Any, ScaleVariables]:
    if graph is None:
        return _eager_variables
    return kept_in_graph.find_or_make(graph(), _COLLECTION, weakref.WeakKeyDictionary)


def _outermost_graph() -> weakref.ref | None:
    """Returns the TF 1 graph outside of all conditions and loops; None in eager execution."""
    with tf.init_scope():
        return None if tf.executing_eagerly() else weakref.ref(tf.compat.v1.get_default_graph())


class MovingLossScaleManager(_SerializableManager):
    """Base class of managers whose scale changes: holds the variables, and the rule that changes the scale.

    Args:
      name: name of the module.
      rule: the rule that raises and lowers the scale.
      init_loss_scale: scale of the first step, or an array of several scales that change independently.
      constants: the arguments of the constructor, by name.
    Graph: three global variables, saved with the model: `loss_scale` (float32), `good_steps` and `bad_steps` (int32).
      Each further graph gets variables of its own at its first use of the manager.
    """

    _may_start_below_lowest = False

    def __init__(self, name: str, rule: ScaleRule, init_loss_scale: Any, constants: dict):
        super().__init__(name=name)
        self._rule = rule
        self._constants: Any = functools.partial(dict, constants)  # a dict itself would become part of checkpoints
        self._first: Any = functools.partial(np.asarray, init_loss_scale)
        self._loss_scale, self._fetched, self._good_steps, self._bad_steps = make_scale_variables(self._first())
        self._graph: Any = _outermost_graph() or (lambda: None)

    @property
    def variables(self) -> tuple:
        """The variables in the default TF 1 graph or in eager execution; those made first if it has none yet."""
        here = _variables_in(_outermost_graph()).get(self)
        if here is None:
            return super().variables
        pairs = ((self._loss_scale, here.scale), (self._good_steps, here.good_steps), (self._bad_steps, here.bad_steps))
        own = {id(first): variable for first, variable in pairs}
        return tuple(own.get(id(variable), variable) for variable in super().variables)

    def get_loss_scale(self):
        """Returns the scale, a float32 scalar. In a TF 1 graph, a run that updates the scale reads the old value."""
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        state = self._variables(_outermost_graph())
        # Inside a loop or a condition the scale is read again.
        if state.fetched is not None and state.fetched.graph is graph and current_control_flow_context(graph) is None:
            return state.fetched
        return tf.convert_to_tensor(state.scale)

    @property
    def scale_shape(self) -> tf.TensorShape:
        """The shape of the scale: () for one scale, (n,) for n scales that change independently."""
        return self._loss_scale.shape

    def agreed_constants(self):
        """Returns the arguments of the constructor."""
        return self._constants()

    def can_lower(self, scale: float) -> bool:
        """Returns whether steps with an overflow can ever lower this scale."""
        return self._rule.can_lower(scale)

    def update_loss_scale(self, finite_grads):
        """Counts the step as good or bad, and changes the scale when a counter is full; see `LossScaleManager`."""
        of_graph = self._variables(_outermost_graph())
        variables = (of_graph.scale, of_graph.good_steps, of_graph.bad_steps)
        counters = (tf.convert_to_tensor(variable) for variable in variables[1:])
        scale, bounds = self.get_loss_scale(), self._bounds()
        if bounds != (SMALLEST_SCALE, LARGEST_SCALE):  # the scale can be restored from a manager of other bounds
            scale = tf.clip_by_value(scale, *bounds)
        state = self._rule.next_state(ScaleState(scale, *counters), finite_grads)
        # All three values are computed, and the scale is read for other fetches, before the first variable changes.
        with tf.control_dependencies(state):
            assigned = [variable.assign(value) for variable, value in zip(variables, state)]
        return None if tf.executing_eagerly() else tf.group(*assigned, name="update_loss_scale")

    def set_loss_scale(self, loss_scale, session=None):
        """Sets the scale of the next step and resets the counters to 0; the rule continues from this scale.

        Args:
          loss_scale: a number, or an array of shape () or (1,).
          session: in a TF 1 graph the training session, by default the default session; nothing is added to the graph.
        Raises:
          TypeError: `loss_scale` is not a number.
          ValueError: `loss_scale` is out of range or has another shape, or there is no session.
        Ranks: local; set the same value on all ranks, between the same two steps.
        """
        owner = f"{type(self).__name__}.set_loss_scale"
        self._write(ScaleState(self._checked_scale(owner, loss_scale), 0, 0), session, owner)

    def get_state(self, session=None) -> ScaleState:
        """Returns the scale and its counters as numbers.

        Args:
          session: in a TF 1 graph the training session, by default the default session.
        Raises:
          ValueError: the manager belongs to a TF 1 graph and there is no session.
        """
        return ScaleState(*read_values(self._state_variables(session), session, f"{type(self).__name__}.get_state"))

    def set_state(self, state, session=None):
        """Sets the scale and its counters.

        Args:
          state: a result of `get_state`.
          session: in a TF 1 graph the training session, by default the default session.
        Raises:
          TypeError: a value is not a number.
          ValueError: the scale is out of range, a counter is negative, or there is no session.
        """
        owner = f"{type(self).__name__}.set_state"
        self._write(self.check_state(state, owner), session, owner)

    def check_state(self, state, owner) -> ScaleState:
        """Checks a state and converts it to the shape of the variables; raises the errors of `set_state`."""
        state = ScaleState(*state)
        for name, steps in zip(state._fields[1:], state[1:]):
            for number in np.ravel(steps):
                check_count(owner, name, number.item(), at_least=0)
        return state._replace(scale=self._checked_scale(owner, state.scale))

    def _checked_scale(self, owner, loss_scale):
        """Checks a scale and converts it to the shape of its variable."""
        scale = np.asarray(loss_scale)
        if scale.dtype.kind not in "iuf":
            check_scale(owner, "loss_scale", loss_scale)
        shape = tuple(self._loss_scale.shape)
        if scale.shape not in ((), (1,), shape):
            expected, fix = f"the shape () or {shape or (1,)}", "Pass one number."
            problem = "loss_scale has another shape"
            raise ValueError(message(owner, problem, expected, f"{scale.shape}", fix))
        lowest, highest = self._bounds()
        for number in np.ravel(scale):
            check_number(owner, "loss_scale", number.item(), at_least=lowest, at_most=highest)
        return np.broadcast_to(scale.reshape(shape if scale.size > 1 else ()), shape)

    def _bounds(self):
        lowest = SMALLEST_SCALE if self._may_start_below_lowest else self._rule.min_scale
        return lowest or SMALLEST_SCALE, self._rule.max_scale or LARGEST_SCALE

    def _state_variables(self, session):
        session = session or tf.compat.v1.get_default_session()
        state = self._variables(weakref.ref(session.graph) if hasattr(session, "graph") else _outermost_graph())
        return [state.scale, state.good_steps, state.bad_steps]

    def _variables(self, graph: weakref.ref | None) -> ScaleVariables:
        """Returns the variables of a TF 1 graph (None: of eager execution); makes them at the first call."""
        of_graph = graph() if graph is not None else None
        if of_graph is self._graph():
            return ScaleVariables(self._loss_scale, self._fetched, self._good_steps, self._bad_steps)
        known = _variables_in(graph)
        if self not in known:
            with of_graph.as_default() if of_graph is not None else tf.init_scope(), tf.compat.v1.name_scope(None):
                known[self] = make_scale_variables(self._first())
        return known[self]

    def _write(self, state, session, owner):
        shape = tuple(self._loss_scale.shape)
        write_values(self._state_variables(session), [np.broadcast_to(value, shape) for value in state], session, owner)


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
        rule = ScaleRule(
            growth_interval=check_count(owner, "incr_every_n_steps", incr_every_n_steps),
            bad_steps=check_count(owner, "decr_every_n_nan_or_inf", decr_every_n_nan_or_inf),
            growth_factor=check_growth(owner, "incr_ratio", incr_ratio),
            backoff_factor=check_backoff(owner, "decr_ratio", decr_ratio),
            min_scale=1.0,
        )
        constants = {
            "init_loss_scale": first,
            "incr_every_n_steps": rule.growth_interval,
            "decr_every_n_nan_or_inf": rule.bad_steps,
            "incr_ratio": rule.growth_factor,
            "decr_ratio": rule.backoff_factor,
        }
        super().__init__("exponential_update_loss_scale", rule, first, constants)


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
