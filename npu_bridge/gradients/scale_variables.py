"""Keeps a loss scale that changes and its counters in variables, one set for each graph."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from npu_bridge.base import kept_in_graph
from npu_bridge.base.arguments import check_count, check_number
from npu_bridge.base.errors import message
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.tf_internals.graphs import current_control_flow_context, set_variable_name
from npu_bridge.gradients import collections
from npu_bridge.gradients.scale_rule import (
    LARGEST_SCALE,
    MOST_COUNTED_STEPS,
    SMALLEST_SCALE,
    ScaleRule,
    ScaleState,
    check_scale,
)


class ScaleVariables(NamedTuple):
    """The variables of a loss scale in one graph, and the tensor that reads the scale; None in eager execution."""

    scale: tf.Variable
    fetched: tf.Tensor | None
    good_steps: tf.Variable
    bad_steps: tf.Variable

    @property
    def state(self) -> ScaleState:
        """The variables of the state."""
        return ScaleState(self.scale, self.good_steps, self.bad_steps)


def make_scale_variables(first: np.ndarray) -> ScaleVariables:
    """Creates the variables of a loss scale outside of all conditions and loops.

    Args:
      first: the scale of the first step, or an array of several scales.
    """
    nothing = np.zeros(first.shape, np.int32)
    with tf.init_scope():
        return ScaleVariables(
            *_scale_variable(first), counter_variable(nothing, "good_steps"), counter_variable(nothing, "bad_steps")
        )


def _scale_variable(initial_value: Any) -> tuple[tf.Variable, tf.Tensor | None]:
    """Creates the variable of a loss scale and, in a TF 1 graph, the tensor `loss_scale:0` that reads it.

    The op named `loss_scale` is a read of the variable, and the update waits for this read. The variable itself would
    not do: a fetch of a reference variable can return the scale of the next step, which the update has already
    written, and the handle of a resource variable cannot be fetched. The variable is still saved as `loss_scale`.

    Returns:
      The variable, and the tensor, or None in eager execution.
    """
    with tf.init_scope():
        if tf.executing_eagerly():
            return counter_variable(initial_value, "loss_scale", tf.float32), None
        with tf.name_scope("loss_scale") as scope:
            variable = counter_variable(initial_value, "state", tf.float32, use_resource=True)
            fetched = tf.identity(variable.read_value(), name=scope)
    set_variable_name(variable, fetched.name, _SavedNameInfo(fetched.op.name, [], [], []))
    return variable, fetched


class _SavedNameInfo(tf.Variable.SaveSliceInfo):
    """Makes savers store a whole variable under another name than the name of its op."""

    spec = ""  # savers read this as the whole variable


def counter_variable(initial_value: Any, name: str, dtype: tf.DType = tf.int32, use_resource: bool | None = None):
    """Creates a variable that is saved with the model, outside the caller's control flow and control dependencies."""
    with tf.init_scope():
        is_graph = not tf.executing_eagerly()
    variable = tf.compat.v1.Variable(
        initial_value=lambda: tf.constant(initial_value, dtype),
        dtype=dtype,
        name=name,
        trainable=False,
        use_resource=not is_graph if use_resource is None else use_resource,
    )
    collections.publish_in_graph(collections.LOSS_SCALE_STATE, variable)
    return variable


def write_values(variables: Sequence[tf.Variable], values: Sequence[Any], session: Any, owner: str) -> None:
    """Sets variables between two steps, without adding operators to a TF 1 graph.

    Args:
      variables: variables of eager execution, or variables of one TF 1 graph.
      values: a number or array for each variable.
      session: a session of the graph, by default the default session; eager variables need none. Hooks of a
        `MonitoredSession` do not run.
      owner: name of the caller, for messages.
    Raises:
      ValueError: the variables belong to a graph and there is no session.
    """
    if variables[0].initializer is None:
        for variable, value in zip(variables, values):
            variable.assign(value)
        return
    # The values are fed in place of the initial values.
    feeds = {variable.initializer.inputs[1]: value for variable, value in zip(variables, values)}
    _require_session(session, owner).run([variable.initializer for variable in variables], feeds)


def read_values(variables: Sequence[tf.Variable], session: Any, owner: str) -> list:
    """Reads the values of variables as numpy arrays; arguments and errors as in `write_values`."""
    if variables[0].initializer is None:
        return [variable.numpy() for variable in variables]
    return _require_session(session, owner).run(list(variables))


def _require_session(session, owner):
    session = session or tf.compat.v1.get_default_session()
    if session is None:
        problem, expected = "there is no default session", "the session that trains, in a TF 1 graph"
        raise ValueError(message(owner, problem, expected, "no session", "Pass session=session."))
    return session.raw_session() if hasattr(session, "raw_session") else session


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


class MovingScale(tf.Module):
    """A loss scale that changes: its variables in each graph, and the rule that changes it.

    Args:
      name: name of the module.
      rule: the rule that raises and lowers the scale.
      init_loss_scale: scale of the first step, or an array of several scales that change independently.
      constants: the arguments of the manager's constructor, by name.
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
        first = (self._loss_scale, self._good_steps, self._bad_steps)
        own = {id(variable): of_graph for variable, of_graph in zip(first, here.state)}
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
        """Returns the arguments of the manager's constructor."""
        return self._constants()

    def can_lower(self, scale: float) -> bool:
        """Returns whether steps with an overflow can ever lower this scale."""
        return self._rule.can_lower(scale)

    def update_loss_scale(self, finite_grads):
        """Counts the step as good or bad, and changes the scale when a counter is full."""
        variables = self._variables(_outermost_graph()).state
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
                check_count(owner, name, number.item(), at_least=0, at_most=MOST_COUNTED_STEPS)
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
        lowest, highest = self._rule.bounds
        return SMALLEST_SCALE if self._may_start_below_lowest else lowest, highest

    def _state_variables(self, session):
        session = session or tf.compat.v1.get_default_session()
        graph = weakref.ref(session.graph) if hasattr(session, "graph") else _outermost_graph()
        return self._variables(graph).state

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
