"""Replaces 16-bit variables by float32 stand-ins in an update; also TF 1 reference variables, if Keras updates them.

In bfloat16 a decay of 0.999 rounds to 1, and a change of a thousandth of a weight is lost. So an optimizer never gets
a 16-bit variable. Instead it updates a stand-in, a float32 variable of the same name that also has the slots, and the
16-bit variable is set to the rounded result. A stand-in is part of the optimizer's state. If an element of the variable
differs from the rounded stand-in, other code has changed the variable: an assignment, or a checkpoint without
stand-ins. The element of the stand-in is then set to the value of the variable.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any, Callable

from npu_bridge.base.errors import message
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.tf_internals import keras3
from npu_bridge.base.tf_internals.graphs import is_reference as is_reference_dtype
from npu_bridge.base.tf_internals.graphs import make_stand_in_variable
from npu_bridge.base.tf_internals.savers import track_part
from npu_bridge.gradients.arithmetic import is_16_bit, map_values
from npu_bridge.gradients.graph_mode import initialise_with_keras, is_building_graph, value_before_update

# The slot name of stand-ins; checkpoints call them `<variable>/float32`.
SLOT = "float32"


def is_reference(variable: Any) -> bool:
    """Returns whether a variable is a TF 1 reference variable."""
    return isinstance(variable, tf.Variable) and is_reference_dtype(variable.dtype)


def check_takes_stand_ins(optimizer: Any, owner: str) -> None:
    """Rejects an optimizer that cannot train 16-bit variables.

    Raises:
      ValueError: the optimizer updates variables in another thread, or evaluates the loss with changed variables.
    """
    name = type(optimizer).__name__
    if hasattr(optimizer, "set_unscaled_loss"):
        problem = f"{name} evaluates the loss with changed variables, which 16 bits would round"
    elif isinstance(optimizer, tf.compat.v1.train.SyncReplicasOptimizer):
        problem = f"{name} updates variables in a separate thread, where 16 bits would round its arithmetic"
    else:
        return
    fix = "Use another optimizer, or keep the variables in float32: O2, or master_weights=True."
    raise ValueError(message(owner, problem, "variables in float32", "variables of 16 bits", fix))


class StandIns:
    """The stand-ins of one optimizer: variables that it updates in place of 16-bit variables and reference variables.

    Args:
      optimizer: the optimizer, with which checkpoints save the stand-ins.
      takes_references: whether the optimizer can update TF 1 reference variables directly.
      updates_16_bit: whether the optimizer updates 16-bit variables directly, so that they get no stand-ins.
    Graph: a float32 variable for each 16-bit variable that is updated. The stand-in of a reference variable is a copy
      for one step, and is not saved in checkpoints.
    """

    def __init__(self, optimizer: Any, takes_references: bool, updates_16_bit: bool):
        self._optimizer = optimizer
        self._takes_references = takes_references
        self._updates_16_bit = updates_16_bit
        self._made: dict[Any, _StandIn | None] = {}
        self._module: Any = None
        self._saved_names: collections.Counter = collections.Counter()

    def find_or_make(self, variables: Sequence) -> list:
        """Returns the stand-ins of `variables`, which the optimizer updates instead; creates missing stand-ins."""
        made = [self._stand_in_of(variable) for variable in variables]
        return [variable if stand_in is None else stand_in.seen for stand_in, variable in zip(made, variables)]

    @property
    def saved_variables(self) -> list:
        """The float32 variables that replace 16-bit variables in the optimizer and are saved in checkpoints."""
        return [stand_in.values for stand_in in self._made.values() if stand_in is not None and stand_in.is_kept]

    def slot_of(self, variable: Any) -> Any:
        """Returns the float32 stand-in of a variable, or None."""
        stand_in = self._made.get(variable.ref())
        return stand_in.values if stand_in is not None and stand_in.is_kept else None

    def update(self, grads_and_vars: Sequence, update: Callable[[list], Any]) -> Any:
        """Calls `update` with stand-ins and float32 gradients, then copies the results to the variables.

        Returns:
          The result of `update`. In a TF 1 graph with stand-ins: an op.
        """
        given = [variable for grad, variable in grads_and_vars if grad is not None]
        by_variable = {variable.ref(): made for variable in given if (made := self._stand_in_of(variable)) is not None}
        if not by_variable:
            return update(list(grads_and_vars))
        return self._change_through_stand_ins(
            list(by_variable.values()),
            lambda: update([_replace_by_stand_in(by_variable, *pair) for pair in grads_and_vars]),
        )

    def call_with_stand_ins(self, variables: Sequence, function: Callable[[list], Any]) -> Any:
        """Calls `function` with the variables, or stand-ins in their place; then copies the stand-ins to the variables.

        Returns:
          The result of `function`. In a TF 1 graph with stand-ins: an op.
        """
        made = [stand_in for stand_in in map(self._stand_in_of, variables) if stand_in is not None]
        if not made:
            return function(list(variables))
        return self._change_through_stand_ins(made, lambda: function(self.find_or_make(variables)))

    def _change_through_stand_ins(self, stand_ins, change):
        with tf.name_scope("stand_ins"):
            current = [stand_in.copy_from_variable() for stand_in in stand_ins]
        if not is_building_graph():
            done = change()
            for stand_in in stand_ins:
                stand_in.copy_to_variable()
            return done
        with tf.control_dependencies(current):
            done = change()
        with tf.control_dependencies([] if done is None else [done]), tf.name_scope("stand_ins"):
            return tf.group(*([] if done is None else [done]), *(stand_in.copy_to_variable() for stand_in in stand_ins))

    def _stand_in_of(self, variable):
        reference = variable.ref()
        if reference not in self._made:
            self._made[reference] = self._make_stand_in(variable) if self._needs_stand_in(variable) else None
        return self._made[reference]

    def _needs_stand_in(self, variable):
        if is_16_bit(variable):
            return not self._updates_16_bit
        return not self._takes_references and is_reference(variable)

    def _make_stand_in(self, variable):
        owner = type(self._optimizer).__name__
        if is_16_bit(variable):
            check_takes_stand_ins(self._optimizer, owner)
        if isinstance(variable, tf.distribute.DistributedValues) or not variable.shape.is_fully_defined():
            problem = f"the 16-bit variable {variable.name} cannot be updated in float32"
            expected, fix = "one variable of known shape", "Keep the variable in float32: O2, or master_weights=True."
            got = f"{type(variable).__name__} of shape {variable.shape}"
            raise ValueError(message(owner, problem, expected, got, fix))
        made = _StandIn(variable, self._takes_references)
        if made.is_kept:
            if self._module is None:  # tracked only when it holds something, so that other checkpoints stay unchanged
                self._module = tf.Module(name=SLOT)
                track_part(self._optimizer, self._module, SLOT, overwrite=True)
            name, graph = keras3.name_of(variable), getattr(made.values, "graph", None)
            number = self._saved_names[name, id(graph)]  # in eager execution, variables can share a name
            self._saved_names[name, id(graph)] += 1
            track_part(self._module, made.values, f"{name}_{number}" if number else name, overwrite=True)
        return made


class _StandIn:
    """The stand-in of one variable.

    Attributes:
      values: the variable that holds the values of the stand-in.
      seen: the object that the optimizer gets: `values` under the name of the original variable.
      is_kept: whether the stand-in keeps its value between steps.
    """

    def __init__(self, variable, takes_references):
        self._variable = variable
        self.is_kept = is_16_bit(variable)
        self._dtype = tf.as_dtype(variable.dtype).base_dtype
        dtype = tf.float32 if self.is_kept else self._dtype
        name = variable.name.partition(":")[0]
        with tf.init_scope(), tf.compat.v1.name_scope(None):  # outside of the caller's conditions and scopes
            is_eager = tf.executing_eagerly()
            # In a graph any value works: the first step finds that the variable differs from the rounded value.
            self.values = tf.compat.v1.Variable(
                initial_value=lambda: tf.cast(variable, dtype) if is_eager else tf.zeros(variable.shape, dtype),
                trainable=False,
                use_resource=True,
                name=f"{name}/{SLOT}",
                dtype=dtype,
                collections=None if self.is_kept else [],
            )
            if self.is_kept:
                initialise_with_keras([self.values])
            shares_slots = takes_references or not is_reference(variable)
            self.seen = make_stand_in_variable(variable, self.values, dtype, shares_slots)

    def copy_from_variable(self):
        """Copies elements of the variable to the stand-in where the rounded stand-in differs; returns the op."""
        value = (value_before_update if is_reference(self._variable) else tf.identity)(self._variable)
        if self.is_kept:
            kept = self.values.read_value()
            value = tf.where(tf.equal(tf.cast(kept, self._dtype), value), kept, tf.cast(value, kept.dtype))
        return self.values.assign(value, read_value=False)

    def copy_to_variable(self):
        """Assigns the rounded stand-in to the variable; returns the op."""
        return tf.compat.v1.assign(self._variable, tf.cast(self.values.read_value(), self._dtype))


def _replace_by_stand_in(stand_ins_by_variable, grad, variable):
    made = stand_ins_by_variable.get(variable.ref())
    if grad is None:
        return grad, variable
    if made is None:  # Keras needs all gradients from one graph, and this code can run inside a branch
        return map_values(grad, tf.identity), variable
    return map_values(grad, lambda values: tf.identity(tf.cast(values, made.seen.dtype))), made.seen
