"""Adapts optimizers of every family to one small interface, `InnerOptimizer`.

TensorFlow 2.15 has three families: TF 1 optimizers, Keras legacy optimizers (such as those of tensorflow-addons) and
Keras optimizers. Optimizers of Keras 3 are the fourth family. Pipelines call only the interface, whatever the family.
"""

from __future__ import annotations

import abc
import contextlib
from typing import Any, Callable

from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.tf_internals import keras3, training
from npu_bridge.base.tf_internals.graphs import original_variable_of, shared_name
from npu_bridge.gradients.arithmetic import sum_in_order
from npu_bridge.gradients.graph_mode import (
    build_update_in_program_order,
    correct_initial_rate,
    create_order_independent_variable,
    group_in_graph,
    is_building_graph,
)
from npu_bridge.gradients.stand_ins import SLOT, StandIns

_MARK = "_averages_over_ranks"


class InnerOptimizer(abc.ABC):
    """The interface through which a pipeline calls the optimizer that it wraps.

    Attributes:
      optimizer: the wrapped optimizer.
      saved_as: the object that object-based checkpoints save as the optimizer: a wrapper, or `optimizer` itself.
      stand_ins: the float32 variables that the optimizer updates in place of 16-bit variables.
      updates_in_float32: whether 16-bit variables have such a stand-in, here or inside of `optimizer`.
    """

    takes_references = True

    def __init__(self, optimizer, updates_16_bit=True, saved_as=None):
        self.optimizer = optimizer
        self.saved_as = optimizer if saved_as is None else saved_as
        self.stand_ins = StandIns(optimizer, self.takes_references, updates_16_bit)
        self.updates_in_float32 = not updates_16_bit or getattr(type(optimizer), "has_stand_ins", False)

    def create_state(self, variables: list) -> None:
        """Creates the optimizer state that cannot be created inside the condition that skips steps."""
        self.stand_ins.find_or_make(variables)

    def make_slots(self, variables: list) -> list:
        """Creates the missing slots of `variables`, and returns all their slots."""
        self.create_state(variables)
        return self.slots_of(variables)

    def slots_of(self, variables: list) -> list:
        """Returns the existing slots of `variables`, in an order that is the same on every rank."""
        slots = [self.get_slot(variable, name) for name in self.get_slot_names() for variable in variables]
        return [slot for slot in slots if slot is not None]

    @abc.abstractmethod
    def make_own_and_remote_slots(
        self, own_variables: list, remote_variables: dict[int, list], creator: Callable
    ) -> None:
        """Creates the slots of `own_variables`, and through `creator` the slots of variables in `remote_variables`."""

    @abc.abstractmethod
    def compute_gradients(self, loss: Any, **arguments: Any) -> list:
        """Returns pairs of (gradient or None, variable); arguments as in `tf.compat.v1.train.Optimizer`."""

    def pass_losses(self, losses: list, loss_values: list) -> None:
        """Passes the unscaled losses to an optimizer that evaluates the loss again, such as `dim_reduce`.

        Args:
          losses: tensors, or functions that return a loss.
          loss_values: the values of the losses for this batch.
        """
        set_unscaled_loss = getattr(self.optimizer, "set_unscaled_loss", None)
        if set_unscaled_loss is None:
            return
        if any(map(callable, losses)):
            set_unscaled_loss(lambda: sum_in_order([loss() for loss in losses]), sum_in_order(loss_values))
        else:
            set_unscaled_loss(sum_in_order(losses), sum_in_order(loss_values))

    @abc.abstractmethod
    def apply_gradients(self, grads_and_vars: list, global_step: Any, name: Any) -> Any:
        """Updates the variables, then adds 1 to `global_step` if given; returns the op, or None in eager execution."""

    def get_slot(self, variable, name):
        """Returns the slot `name` of a variable, or None."""
        if name == SLOT and self.stand_ins.saved_variables:
            return self.stand_ins.slot_of(variable)
        return self._slot(variable, name)

    def get_slot_names(self) -> list:
        """Returns the sorted names of the slots."""
        return sorted([*self._slot_names(), *([SLOT] if self.stand_ins.saved_variables else [])])

    def variables(self) -> list:
        """Returns the variables of the optimizer, with the stand-ins."""
        return [*self._variables(), *self.stand_ins.saved_variables]

    def _slot(self, variable, name):
        (seen,) = self.stand_ins.find_or_make([variable])
        return self.optimizer.get_slot(seen, name)

    def _slot_names(self):
        return self.optimizer.get_slot_names()

    def _variables(self):
        return self.optimizer.variables()

    def joint_update_key(self, variable: Any) -> Any:
        """Returns a key that is equal for variables updated in one flat tensor; None for a variable updated alone."""
        key_of = getattr(self.optimizer, "joint_update_key", None)
        return None if key_of is None else key_of(variable)


def adapt_optimizer(
    optimizer: Any, owner: str, applies_updates: bool = True, accepts_keras3: bool = False, saved_as: Any = None
) -> InnerOptimizer:
    """Wraps an optimizer in the `InnerOptimizer` of its family.

    Args:
      optimizer: an optimizer of any family.
      owner: name of the class that received the optimizer, for the error message.
      applies_updates: False if another object calls the optimizer's `apply_gradients`.
      accepts_keras3: whether optimizers of Keras 3 are accepted.
      saved_as: the wrapper that object-based checkpoints save in place of the optimizer.
    Raises:
      TypeError: `optimizer` is of no known family, or of Keras 3 without `accepts_keras3`.
    """
    # An optimizer with stand-ins of its own needs the original variables.
    updates_16_bit = not applies_updates or getattr(type(optimizer), "has_stand_ins", False)
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return _Tf1Optimizer(optimizer, updates_16_bit, saved_as)
    if isinstance(optimizer, tf.keras.optimizers.legacy.Optimizer):
        return _KerasLegacyOptimizer(optimizer, updates_16_bit, saved_as)
    if isinstance(optimizer, tf.keras.optimizers.Optimizer):
        return _KerasOptimizer(optimizer, updates_16_bit, saved_as)
    if accepts_keras3:
        return _Keras3Optimizer(optimizer, updates_16_bit, saved_as)
    is_class = isinstance(optimizer, type)
    fix = f"Write {optimizer.__name__}(...)." if is_class else "Pass the optimizer object itself."
    if keras3.is_optimizer(optimizer):
        fix = "For optimizers of Keras 3, use npu_keras_optimizer(...)."
    raise TypeError(
        f"{owner}: the argument is not an optimizer. Expected a tf.compat.v1.train.Optimizer, a "
        f"tf.keras.optimizers.legacy.Optimizer or a tf.keras.optimizers.Optimizer; got {optimizer!r} of type "
        f"{type(optimizer).__name__}. {fix}"
    )


def mark_as_distributed(optimizer: Any) -> None:
    """Marks an optimizer as averaging its gradients over the ranks, so that wrappers do not average again."""
    object.__setattr__(optimizer, _MARK, True)


def is_distributed(optimizer: Any) -> bool:
    """Returns whether an optimizer averages over the ranks, itself or inside a Keras loss-scale optimizer."""
    while optimizer is not None:
        if getattr(optimizer, _MARK, False):
            return True
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return False


class _Tf1Optimizer(InnerOptimizer):
    def make_slots(self, variables):
        with tf.init_scope():
            self._make_missing_slots(variables)
        return super().make_slots(variables)

    def make_own_and_remote_slots(self, own_variables, remote_variables, creator):
        with tf.init_scope():
            _make_slots_in_two_groups(self._make_missing_slots, own_variables, remote_variables, creator)

    def _make_missing_slots(self, variables):
        training.create_slots(self.optimizer, self.stand_ins.find_or_make(variables))

    def compute_gradients(self, loss, **arguments):
        return self.optimizer.compute_gradients(loss, **arguments)

    def apply_gradients(self, grads_and_vars, global_step, name):
        return self.stand_ins.update(
            grads_and_vars, lambda pairs: self.optimizer.apply_gradients(pairs, global_step=global_step, name=name)
        )


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


class _KerasLegacyOptimizer(_KerasFamily):
    def make_slots(self, variables):
        with tf.name_scope(training.scope_of_variables(self.optimizer)), tf.init_scope():
            self._make_missing_slots(variables)
        return super().make_slots(variables)

    def make_own_and_remote_slots(self, own_variables, remote_variables, creator):
        with tf.name_scope(training.scope_of_variables(self.optimizer)), tf.init_scope():
            _make_slots_in_two_groups(self._make_missing_slots, own_variables, remote_variables, creator)

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


class _KerasOptimizer(_KerasSlotFamily):
    def __init__(self, optimizer, updates_16_bit, saved_as=None):
        super().__init__(optimizer, updates_16_bit, saved_as)
        self._updated_variables = []
        correct_initial_rate(optimizer)

    def create_state(self, variables):
        self._updated_variables = variables
        with tf.name_scope(self.optimizer.name or "optimizer"), tf.init_scope():
            with tf.variable_creator_scope(create_order_independent_variable):
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
        return build_update_in_program_order(lambda: self.optimizer.apply_gradients(grads_and_vars), grads_and_vars)

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


class _Keras3Optimizer(_KerasSlotFamily):
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


def _make_slots_in_two_groups(make, own_variables, remote_variables, creator):
    """Calls `make` for `own_variables`, then for each list of `remote_variables` inside a variable creator scope."""
    if own_variables:
        make(own_variables)
    with tf.variable_creator_scope(creator):
        for variables in remote_variables.values():
            if variables:
                make(variables)
