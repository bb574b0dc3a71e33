"""Defines `InnerOptimizer`, the interface through which pipelines call optimizers; adapts optimizers of TF 1 to it.

`gradients/keras/inner.py` adapts the optimizers of Keras, and `families.py` chooses the adapter of an optimizer.
"""

from __future__ import annotations

import abc
from typing import Any, Callable

from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.tf_internals import training
from npu_bridge.gradients.arithmetic import sum_in_order
from npu_bridge.gradients.inner.stand_ins import SLOT, StandIns

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


class Tf1Optimizer(InnerOptimizer):
    """Adapts an optimizer of TF 1."""

    def make_slots(self, variables):
        with tf.init_scope():
            self._make_missing_slots(variables)
        return super().make_slots(variables)

    def make_own_and_remote_slots(self, own_variables, remote_variables, creator):
        with tf.init_scope():
            make_slots_in_two_groups(self._make_missing_slots, own_variables, remote_variables, creator)

    def _make_missing_slots(self, variables):
        training.create_slots(self.optimizer, self.stand_ins.find_or_make(variables))

    def compute_gradients(self, loss, **arguments):
        return self.optimizer.compute_gradients(loss, **arguments)

    def apply_gradients(self, grads_and_vars, global_step, name):
        return self.stand_ins.update(
            grads_and_vars, lambda pairs: self.optimizer.apply_gradients(pairs, global_step=global_step, name=name)
        )


def make_slots_in_two_groups(
    make: Callable[[list], Any], own_variables: list, remote_variables: dict[int, list], creator: Callable
) -> None:
    """Calls `make` for `own_variables`, then for each list of `remote_variables` inside a variable creator scope."""
    if own_variables:
        make(own_variables)
    with tf.variable_creator_scope(creator):
        for variables in remote_variables.values():
            if variables:
                make(variables)
