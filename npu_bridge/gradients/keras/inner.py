"""Adapts Keras optimizers of the three families (legacy, current, Keras 3) to the interface `InnerOptimizer`."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Sequence
from typing import Any, Callable

from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.tf_internals import keras3, training
from npu_bridge.base.tf_internals.graphs import original_variable_of, shared_name, update_input
from npu_bridge.gradients.graph_mode import group_in_graph, is_building_graph
from npu_bridge.gradients.inner.interface import InnerOptimizer, make_slots_in_two_groups
from npu_bridge.gradients.inner.stand_ins import SLOT
from npu_bridge.graph.control_flow import classic_control_flow


class _KerasFamily(InnerOptimizer):
    """Base of the Keras families: computes gradients as in TF 1, and increments `global_step`."""

    takes_references = False

    def compute_gradients(self, loss, **arguments):
        differentiator = tf.compat.v1.train.GradientDescentOptimizer(learning_rate=0.0)
        return differentiator.compute_gradients(loss, **arguments)

    def apply_gradients(self, grads_and_vars, global_step, name):
        if all(grad is None for grad, _ in grads_and_vars):
            names = ", ".join(variable.name for _, variable in grads_and_vars)
            raise ValueError(
                f"No gradients provided for any variable. Expected a gradient for one of {names}; got only None. Check "
                f"that the loss depends on these variables."
            )
        update = self.stand_ins.update(grads_and_vars, lambda pairs: self._update(pairs, name))
        if global_step is None or global_step is self.optimizer.iterations:
            return update
        with tf.control_dependencies([] if update is None else [update]):
            counted = tf.compat.v1.assign_add(global_step, 1)
        return group_in_graph(update, counted)

    @abc.abstractmethod
    def _update(self, grads_and_vars, name):
        """Updates the variables; returns the op of the update, or None in eager execution."""


class KerasLegacyOptimizer(_KerasFamily):
    """Adapts a legacy optimizer of Keras."""

    def make_slots(self, variables):
        with tf.name_scope(training.scope_of_variables(self.optimizer)), tf.init_scope():
            self._make_missing_slots(variables)
        return super().make_slots(variables)

    def make_own_and_remote_slots(self, own_variables, remote_variables, creator):
        with tf.name_scope(training.scope_of_variables(self.optimizer)), tf.init_scope():
            make_slots_in_two_groups(self._make_missing_slots, own_variables, remote_variables, creator)

    def _make_missing_slots(self, variables):
        training.create_all_weights(self.optimizer, self.stand_ins.find_or_make(variables))

    def _update(self, grads_and_vars, name):
        # In a TF 1 graph the sum over the replicas of a strategy is one op over all gradients, even without a strategy,
        # and every update would wait for the last gradient.
        is_stock = training.has_stock_aggregation(self.optimizer)
        takes_switch = type(self.optimizer).apply_gradients is tf.keras.optimizers.legacy.Optimizer.apply_gradients
        is_needless = is_building_graph() and is_stock and takes_switch and not tf.distribute.has_strategy()
        switch = {"experimental_aggregate_gradients": False} if is_needless else {}
        return self.optimizer.apply_gradients(grads_and_vars, name=name, **switch)

    def _slot(self, variable, name):
        try:
            return super()._slot(variable, name)
        except KeyError:  # no slot of that name, or a variable that is never updated
            return None


class _KerasSlotFamily(_KerasFamily):
    """Base of the Keras families whose slots are found by name.

    `_names_of_updated` gives each updated variable with its part of the names of slots. `_split_slot_name` splits such
    a name in every way into a slot and a variable's part, the longest part first.
    """

    def slots_of(self, variables):
        slots = self._slots_by_name()
        if self.stand_ins.saved_variables:
            kept = [variable for variable in variables if self.stand_ins.slot_of(variable) is not None]
            slots[SLOT] = {variable.ref(): self.stand_ins.slot_of(variable) for variable in kept}
        references = [variable.ref() for variable in variables]
        return [slots[name][each] for name in sorted(slots) for each in references if each in slots[name]]

    def _slot(self, variable, name):
        return self._slots_by_name().get(name, {}).get(variable.ref())

    def _slot_names(self):
        return list(self._slots_by_name())

    def _slots_by_name(self):
        """Returns slots by slot name, then by reference of the updated variable."""
        updated, slots, left = {}, {}, {}
        for variable, name in self._names_of_updated():
            updated.setdefault(name, []).append(original_variable_of(keras3.tensorflow_variable_of(variable)).ref())
        for held in self.optimizer.variables:
            # In eager execution, variables can share a name; their slots then have the order of the variables.
            for slot, name in [pair for pair in self._split_slot_name(held.name) if pair[1] in updated][:1]:
                primary = next(left.setdefault((slot, name), iter(updated[name])), updated[name][0])
                slots.setdefault(slot, {}).setdefault(primary, keras3.tensorflow_variable_of(held))
        return slots


class KerasOptimizer(_KerasSlotFamily):
    """Adapts an optimizer of Keras 2 that is not a legacy one."""

    def __init__(self, optimizer, updates_16_bit, saved_as=None):
        super().__init__(optimizer, updates_16_bit, saved_as)
        self._updated_variables = []
        _correct_initial_rate(optimizer)

    def create_state(self, variables):
        self._updated_variables = variables
        with tf.name_scope(self.optimizer.name or "optimizer"), tf.init_scope():
            with tf.variable_creator_scope(_create_order_independent_variable):
                self.optimizer.build(self.stand_ins.find_or_make(variables))

    def make_own_and_remote_slots(self, own_variables, remote_variables, creator):
        # Built once for all variables. `own` comes first, because an update of these alone numbers them from 0 again.
        of_others = [variable for variables in remote_variables.values() for variable in variables]
        primaries = {shared_name(variable) for variable in of_others}

        def create(next_creator, **arguments):
            _, _, primary = (arguments.get("name") or "").partition("/")  # such as "m/dense/kernel"
            if primary in primaries:
                return creator(next_creator, **arguments)
            return next_creator(**arguments)

        with tf.variable_creator_scope(create):
            self.create_state([*own_variables, *of_others])

    def _update(self, grads_and_vars, name):
        if not is_building_graph():
            return self.optimizer.apply_gradients(grads_and_vars)
        # In a TF 1 graph this family makes update ops that nothing refers to: only the step counter would run.
        # A tf.function keeps these ops, and orders them as written.
        return _build_update_in_program_order(lambda: self.optimizer.apply_gradients(grads_and_vars), grads_and_vars)

    def _variables(self):
        return list(self.optimizer.variables)

    def _names_of_updated(self):
        return [(variable, variable.name) for variable in self._updated_variables]

    def _split_slot_name(self, name):
        parts = name.split("/")  # "Adam/m/dense/kernel" ends with "kernel", too: maybe another variable
        return [(parts[start - 1], "/".join(parts[start:])) for start in range(1, len(parts))]


def _are_initialised(variables):
    with tf.init_scope():
        return not tf.executing_eagerly() or all(bool(variable.is_initialized()) for variable in variables)


class Keras3Optimizer(_KerasSlotFamily):
    """Translates between the TensorFlow variables of a pipeline and the Keras variables of a Keras 3 optimizer."""

    def __init__(self, optimizer, updates_16_bit, saved_as=None):
        super().__init__(optimizer, updates_16_bit, saved_as)
        self._known = {}
        self.values_of(keras3.variables_built_with(optimizer))

    def values_of(self, variables):
        """Returns the TensorFlow variables behind variables of Keras, with their constraints; others unchanged."""
        values = list(map(keras3.tensorflow_variable_of, variables))
        for value, variable in zip(values, variables):
            if value is not variable:
                keras3.copy_constraint_and_path(value, variable)
            if variable is not value or value.ref() not in self._known:
                self._known[value.ref()] = variable
        return values

    def keras_variables_of(self, values, wrap=lambda value: value):
        """Returns the Keras variables around TensorFlow variables.

        `wrap` makes the Keras variable of an unknown TensorFlow variable; if it returns None, the variable is left out.
        """
        for value in values:
            if value.ref() not in self._known:
                self._known[value.ref()] = wrap(value)
        return [self._known[value.ref()] for value in values if self._known[value.ref()] is not None]

    def create_state(self, variables):
        seen = self.stand_ins.find_or_make(variables)
        if not self.optimizer.built:
            for value, stand_in in zip(variables, seen):
                if stand_in is not value:
                    keras3.copy_constraint_and_path(stand_in, self._known.get(value.ref()))
            # Slots get their values at once, for ranks to compare, unless the weights are made by the first batch.
            with tf.init_scope() if _are_initialised(seen) else contextlib.nullcontext():
                self.optimizer.build(self.keras_variables_of(seen))

    def make_own_and_remote_slots(self, own_variables, remote_variables, creator):
        raise NotImplementedError("Only TF 1 graphs shard weight updates, and Keras 3 does not train in TF 1 graphs.")

    def update(self, grads_and_vars):
        """Updates variables, given as TensorFlow variables or stand-ins."""
        grads, variables = zip(*grads_and_vars) if grads_and_vars else ((), ())
        self.optimizer.apply(list(grads), self.keras_variables_of(variables))

    def _update(self, grads_and_vars, name):
        self.update(grads_and_vars)

    def _variables(self):
        return list(map(keras3.tensorflow_variable_of, self.optimizer.variables))

    def _names_of_updated(self):
        return [(each, keras3.prefix_of_slots(each)) for each in keras3.variables_built_with(self.optimizer)]

    def _split_slot_name(self, name):
        parts = name.split("_")  # such as dense_kernel_momentum
        return [("_".join(parts[end:]), "_".join(parts[:end]) + "_") for end in range(len(parts) - 1, 0, -1)]


def _build_update_in_program_order(update: Callable[[], Any], grads_and_vars: Sequence[tuple]) -> tf.Operation:
    """Builds the operators of `update` in a TF 1 graph, in the execution order of a `tf.function`; returns the op.

    The operators belong to the graph itself, not to a function, so other code can fetch their tensors.

    Args:
      update: function that updates variables by gradients.
      grads_and_vars: the gradients and variables. The operators read or change a variable only after its gradient has
        been computed; otherwise a loss could be computed with weights that a weight decay has already changed.
    """
    made = tf.function(lambda: [update(), None][1], autograph=False).get_concrete_function().graph
    outer = {inside.name: outside for outside, inside in made.captures}
    changes = [op.name for op in made.control_outputs]
    inside_of = {id(outside): inside.op.name for outside, inside in made.captures}
    gradient_of = {}
    for gradient, variable in grads_and_vars:
        known = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
        handle, inside = inside_of.get(id(variable.handle)), inside_of.get(id(known))
        if handle and inside:
            gradient_of[handle] = inside
            outer[f"^{inside}"] = known
    definition = made.as_graph_def()
    for node in definition.node:
        # Operators that Keras 2.15 computes beside a captured gradient, as for its `global_clipnorm`, name an operator
        # of the outer graph as their neighbour; the importer would look for it among these nodes.
        node.attr.pop("_class", None)
        node.input.extend([f"^{gradient_of[name]}" for name in node.input if name in gradient_of])
    return tf.group(*tf.compat.v1.import_graph_def(definition, outer, changes, name="update"))


def _create_order_independent_variable(next_creator: Callable, **arguments: Any) -> tf.Variable:
    """Creates a variable so that all variables can be initialised together, in any order.

    This matters for variables that start as copies of other variables, such as the moving averages of Keras.
    """
    origin = arguments.get("initial_value")
    if not isinstance(origin, tf.Variable) or not is_building_graph():
        return next_creator(**arguments)
    with classic_control_flow():  # otherwise a reference variable is read before the condition is known
        arguments["initial_value"] = tf.cast(_value_or_initial_value(original_variable_of(origin)), origin.dtype)
        return next_creator(**arguments)


def _correct_initial_rate(optimizer: Any) -> None:
    """Corrects the initial value of a scheduled learning rate, so that variables can be initialised in any order.

    Keras computes this value from the step counter, which can still be uninitialised.
    """
    rate = training.scheduled_rate(optimizer)
    if rate is None or not is_building_graph():
        return
    with tf.init_scope():
        if getattr(rate.handle, "graph", None) is tf.compat.v1.get_default_graph():
            start = training.scheduled_rate_at(optimizer, _value_or_initial_value(optimizer.iterations))
            update_input(rate.initializer, 1, tf.cast(start, rate.dtype))


def _value_or_initial_value(variable):
    """Returns the value of `variable`, or its initial value while the variable is uninitialised."""
    is_initialized = tf.compat.v1.is_variable_initialized(variable)
    return tf.cond(is_initialized, variable.read_value, lambda: variable.initial_value)
