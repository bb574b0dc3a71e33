"""Loss-scale managers: the factor of the loss, and how it grows and shrinks."""

from __future__ import annotations

import abc
import numbers
from typing import Any, NamedTuple

import tensorflow as tf

from npu_bridge.gradients import collections
from npu_bridge.gradients.graph_mode import building_graph
from npu_bridge.options.errors import message, shown
from npu_bridge.tf_internals.graphs import call_by, current_control_flow_context

__all__ = ["ExponentialUpdateLossScaleManager", "FixedLossScaleManager", "LossScaleManager"]

# Growth stops once the scale has reached this limit divided by the growth ratio. Source: documentation of the
# NPU stack's loss-scale manager; a little below the largest float32.
_LARGEST_SCALE = 3.4e38
_SMALLEST_SCALE = 1e-37  # a little above the smallest normal float32; below it a scale would be 0 or lose bits
_MOST_COUNTED_STEPS = 2**31 - 1  # of the counters, int32 in every checkpoint there is

# What a caller is told who gives an optimizer a manager and does not ask it to scale the loss.
WITHOUT_LOSS_SCALE = (
    "%s: the loss is not scaled: loss_scale_manager has no effect without is_loss_scale=True. Add that, or leave the "
    "manager out."
)


class LossScaleManager(tf.Module, abc.ABC):
    """What an optimizer asks about the loss scale. Derive from it to bring your own rule."""

    @abc.abstractmethod
    def get_loss_scale(self) -> tf.Tensor:
        """The scale of the next step, a float32 scalar."""

    @abc.abstractmethod
    def update_loss_scale(self, finite_grads: tf.Tensor) -> Any:
        """Moves the scale on after a step.

        Args:
          finite_grads: boolean scalar, True when the step's gradients could be used.
        Returns:
          The op to run in a TF 1 graph; None when executed eagerly.
        """

    def agreed_constants(self) -> dict:
        """Numbers by name that must be the same on every rank; ranks that differ are told so before they train."""
        return {}


@tf.keras.utils.register_keras_serializable(package="npu_bridge")
class FixedLossScaleManager(LossScaleManager):
    """A loss scale that never changes.

    Args:
      loss_scale: the scale, a number of at least 1. A power of two changes no bit of float32 training.
      enable_overflow_check: False makes `NPULossScaleOptimizer` apply every step, also one with Inf or NaN
        gradients. `NPUOptimizer` always checks.
    Raises:
      TypeError: `loss_scale` is not a number.
      ValueError: `loss_scale` is below 1 or not finite.
    Graph: a float32 constant named `loss_scale`, so that fetching `loss_scale:0` gives the number.
    """

    def __init__(self, loss_scale: float, enable_overflow_check: bool = True):
        super().__init__(name="fixed_loss_scale")
        _check_number("FixedLossScaleManager", "loss_scale", loss_scale, lowest=1, highest=_LARGEST_SCALE)
        self._enable_overflow_check = enable_overflow_check
        self._value = float(loss_scale)
        self._tensor = self._constant()

    def get_loss_scale(self):
        """The fixed scale, a float32 scalar of the graph being built."""
        if not building_graph():
            return self._constant()  # not kept: what is made in a function cannot be used outside of it
        if getattr(self._tensor, "graph", None) is not tf.compat.v1.get_default_graph():
            self._tensor = self._constant()  # made elsewhere: eagerly, or in a graph that is gone
        return self._tensor

    def _constant(self):
        return tf.constant(self._value, dtype=tf.float32, name="loss_scale")

    def agreed_constants(self):
        """The arguments of the constructor."""
        return {"loss_scale": self._value, "enable_overflow_check": bool(self._enable_overflow_check)}

    def get_config(self):
        """What Keras saves with a model: the arguments of the constructor."""
        return self.agreed_constants()

    @classmethod
    def from_config(cls, config):
        """The counterpart of `get_config`."""
        return cls(**config)

    def get_enable_overflow_check(self) -> bool:
        """Whether `NPULossScaleOptimizer` checks gradients before it applies them."""
        return self._enable_overflow_check

    def update_loss_scale(self, finite_grads):
        """Does nothing; returns an op that does nothing (None when executed eagerly)."""
        return None if tf.executing_eagerly() else tf.no_op()


class ScaleState(NamedTuple):
    """What a dynamic loss scale remembers between steps: numbers or scalar tensors.

    Attributes:
      scale: float32, the loss scale.
      good_steps: int32, steps with usable gradients in a row since the scale or a counter last changed.
      bad_steps: int32, steps with unusable gradients since the scale last changed; usable steps do not reset it.
    """

    scale: Any
    good_steps: Any
    bad_steps: Any


@tf.keras.utils.register_keras_serializable(package="npu_bridge")
class ExponentialUpdateLossScaleManager(LossScaleManager):
    """A loss scale that grows while gradients stay usable and shrinks when they overflow.

    After `incr_every_n_steps` good steps in a row the scale is multiplied by `incr_ratio`; after
    `decr_every_n_nan_or_inf` bad steps, which need not follow each other, by `decr_ratio`, but never below 1. Either
    event, also a growth that would pass 3.4e38 and is left out, sets both counters to 0. The first steps of a large
    initial scale overflow by design: that is how the largest scale that works is found.

    Args:
      init_loss_scale: scale of the first step, at least 1e-37. One below 1 is kept until the first shrink makes it 1.
      incr_every_n_steps: whole steps, at least 1. From 2**31 on it means never: the counters stop at 2**31 - 1.
      decr_every_n_nan_or_inf: whole steps, at least 1; likewise.
      incr_ratio: factor of growth, at least 1.
      decr_ratio: factor of shrinking, above 0 and at most 1.
    Raises:
      TypeError: an argument is not a number, or a step count not an integer.
      ValueError: an argument is out of its range.
    Graph: three global variables, saved with the model: `loss_scale` (float32), `good_steps` and `bad_steps` (int32).
      In a TF 1 graph `loss_scale:0` is a tensor, so that fetching it gives a number: together with a training step, the
      scale that this step used; alone, the scale of the next one. The variable's own operators are below that name.
    Source: documentation of the NPU stack's loss-scale manager.
    """

    def __init__(self, init_loss_scale, incr_every_n_steps, decr_every_n_nan_or_inf=2, incr_ratio=2, decr_ratio=0.8):
        super().__init__(name="exponential_update_loss_scale")
        owner = "ExponentialUpdateLossScaleManager"
        _check_number(owner, "init_loss_scale", init_loss_scale, lowest=_SMALLEST_SCALE, highest=_LARGEST_SCALE)
        _check_step_count("incr_every_n_steps", incr_every_n_steps)
        _check_step_count("decr_every_n_nan_or_inf", decr_every_n_nan_or_inf)
        _check_number(owner, "incr_ratio", incr_ratio, lowest=1, highest=_LARGEST_SCALE)
        _check_number(owner, "decr_ratio", decr_ratio, lowest=0, highest=1, lowest_is_allowed=False)
        self._init_loss_scale = float(init_loss_scale)
        self._incr_every_n_steps = int(incr_every_n_steps)
        self._decr_every_n_nan_or_inf = int(decr_every_n_nan_or_inf)
        self._incr_ratio = float(incr_ratio)
        self._decr_ratio = float(decr_ratio)
        self._loss_scale, self._fetched = _scale_variable(self._init_loss_scale)
        self._good_steps = _state_variable(0, tf.int32, "good_steps")
        self._bad_steps = _state_variable(0, tf.int32, "bad_steps")

    def get_loss_scale(self):
        """The current scale, a float32 scalar; in a TF 1 graph the one before the update of the run, always."""
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        # A loop or a condition of the caller reads it anew.
        if self._fetched is not None and self._fetched.graph is graph and current_control_flow_context(graph) is None:
            return self._fetched
        return tf.convert_to_tensor(self._loss_scale)

    def agreed_constants(self):
        """The arguments of the constructor."""
        return {
            "init_loss_scale": self._init_loss_scale,
            "incr_every_n_steps": self._incr_every_n_steps,
            "decr_every_n_nan_or_inf": self._decr_every_n_nan_or_inf,
            "incr_ratio": self._incr_ratio,
            "decr_ratio": self._decr_ratio,
        }

    def get_config(self):
        """What Keras saves with a model: the arguments of the constructor. The state is saved as variables."""
        return self.agreed_constants()

    @classmethod
    def from_config(cls, config):
        """The counterpart of `get_config`."""
        return cls(**config)

    def update_loss_scale(self, finite_grads):
        """Counts the step and moves the scale when a counter is full; see `LossScaleManager`."""
        variables = (self._loss_scale, self._good_steps, self._bad_steps)
        counters = (tf.convert_to_tensor(variable) for variable in variables[1:])
        state = self._next_state(ScaleState(self.get_loss_scale(), *counters), finite_grads)
        # All three are computed before the first changes; and the scale is read, where something else fetches it.
        with tf.control_dependencies(state):
            assigned = [variable.assign(value) for variable, value in zip(variables, state)]
        return None if tf.executing_eagerly() else tf.group(*assigned, name="update_loss_scale")

    def _next_state(self, state: ScaleState, finite) -> ScaleState:
        good_steps = tf.where(finite, _counted_on(state.good_steps), 0)
        bad_steps = tf.where(finite, state.bad_steps, _counted_on(state.bad_steps))
        grows = tf.logical_and(finite, _is_reached(good_steps, self._incr_every_n_steps))
        shrinks = tf.logical_and(tf.logical_not(finite), _is_reached(bad_steps, self._decr_every_n_nan_or_inf))
        grown = tf.where(
            state.scale < tf.constant(_LARGEST_SCALE / self._incr_ratio, tf.float32),
            state.scale * self._incr_ratio,
            state.scale,
        )
        shrunk = tf.maximum(1.0, state.scale * self._decr_ratio)
        is_settled = tf.logical_or(grows, shrinks)
        return ScaleState(
            scale=tf.where(grows, grown, tf.where(shrinks, shrunk, state.scale)),
            good_steps=tf.where(is_settled, 0, good_steps),
            bad_steps=tf.where(is_settled, 0, bad_steps),
        )


def _counted_on(steps):
    return tf.minimum(steps, _MOST_COUNTED_STEPS - 1) + 1


def _is_reached(steps, limit):
    # In 64 bits and bounded: TensorFlow makes a number that is too large for int32 a negative one, without a word.
    return tf.cast(steps, tf.int64) >= min(limit, _MOST_COUNTED_STEPS + 1)


def _scale_variable(initial_value):
    """The variable of a loss scale and, in a TF 1 graph, the tensor `loss_scale:0` that reads it; else None.

    No variable's own op can have that name. A reference variable hands out its buffer, in which a fetch finds what the
    update has left there, the scale of the next step; and the handle of a resource variable cannot be fetched. So the
    op of that name is a read, on which the update depends, and the variable is called and saved by it.
    """
    with tf.init_scope():
        if tf.executing_eagerly():
            return _state_variable(initial_value, tf.float32, "loss_scale"), None
        with tf.name_scope("loss_scale") as scope:
            variable = _state_variable(initial_value, tf.float32, "state", use_resource=True)
            fetched = tf.identity(variable.read_value(), name=scope)
    call_by(variable, fetched.name, _SavedAs(fetched.op.name, [], [], []))
    return variable, fetched


class _SavedAs(tf.Variable.SaveSliceInfo):
    """Has a whole variable saved by another name than that of its op."""

    spec = ""  # what savers take for "all of it"


def _state_variable(initial_value, dtype, name, use_resource=None):
    """A scalar that is saved with the model, made outside any control flow or control dependency of the caller."""
    with tf.init_scope():
        is_graph = not tf.executing_eagerly()
    variable = tf.compat.v1.Variable(
        initial_value=lambda: tf.constant(initial_value, dtype),
        dtype=dtype,
        name=name,
        trainable=False,
        use_resource=not is_graph if use_resource is None else use_resource,
    )
    collections.publish(collections.LOSS_SCALE_STATE, variable)
    return variable


def check_manager(owner: str, manager: Any) -> None:
    """Refuses what is given as a `loss_scale_manager` and is none, such as the scale itself.

    Raises:
      ValueError: there is none.
      TypeError: it is something else.
    """
    if hasattr(manager, "update_loss_scale") and hasattr(manager, "get_loss_scale"):
        return
    got = "None" if manager is None else shown(manager)
    is_scale = isinstance(manager, numbers.Real) and not isinstance(manager, bool) and len(shown(manager)) < 40
    problem = "scaling the loss (is_loss_scale) needs a manager as loss_scale_manager"
    expected = "a FixedLossScaleManager or an ExponentialUpdateLossScaleManager"
    mend = f"Write FixedLossScaleManager({manager!r}) for a fixed scale." if is_scale else "Pass one."
    raise (ValueError if manager is None else TypeError)(message(owner, problem, expected, got, mend))


def _check_number(owner, name, value, lowest, highest, lowest_is_allowed=True):
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        mend = f"Pass a number such as {max(lowest, 0.5)}."
        raise TypeError(message(owner, f"{name} is not a number", "a Python number", shown(value), mend))
    if not (lowest <= value if lowest_is_allowed else lowest < value) or not value <= highest:
        expected = f"{lowest:g} {'<=' if lowest_is_allowed else '<'} {name} <= {highest:g}"
        mend = "Choose a number in that range."
        raise ValueError(message(owner, f"{name} is out of range", expected, shown(value), mend))


def _check_step_count(name, value):
    owner, expected = "ExponentialUpdateLossScaleManager", "whole steps, at least 1"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(message(owner, f"{name} is not an integer", expected, shown(value), "Pass an int."))
    if value < 1:
        mend = "Use 1 to act on every such step."
        raise ValueError(message(owner, f"{name} is out of range", expected, shown(value), mend))
