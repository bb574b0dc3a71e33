"""Freezes the layers that an update does not train: cuts their backward pass, all-reduce and update."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from npu_bridge.base.errors import message
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.tf_internals import keras3
from npu_bridge.gradients.arithmetic import zero_gradient_like
from npu_bridge.gradients.stage import SelectingStage, unknown_gradients_error
from npu_bridge.gradients.stages.freeze_schedule import FreezeSchedule
from npu_bridge.gradients.stages.stopped_backward import cut_backward_pass
from npu_bridge.gradients.step import TrainedGroup
from npu_bridge.gradients.steps.trained_apart import CountersByVariables


@tf.keras.utils.register_keras_serializable(package="npu_bridge")
class Freeze(SelectingStage):
    """Trains one group of variables in each update: all variables, or only the variables of the last layers.

    Gradients of frozen variables are neither computed nor sent. Frozen variables and their slots are neither read nor
    changed. All groups share one set of slots. Schedules and Adam count all updates, as `global_step` or `iterations`
    do, including updates in which a variable was frozen.

    The group depends only on the number of updates, so it is the same on all ranks. Skipped steps and accumulated
    batches do not count.

    `compute_gradients` returns zeros for frozen variables, or no rows for sparse gradients. The backward pass ends
    early in graphs and in a `tf.function` if the optimizer itself computes the gradients (`minimize`, `fit`,
    `compute_gradients`, `Pipeline.gradients`). With gradients of a custom tape, in eager execution, or if XLA compiles
    the whole step, the backward pass is complete, and only the all-reduce and the update are saved.

    Args:
      schedule: a `FreezeSchedule`, or a dictionary of its arguments.
    Raises:
      TypeError, ValueError: as in `FreezeSchedule`; at the first step: the schedule does not fit the variables.
    Graph: a counter of updates, which is saved; for each group a condition with all-reduces and one with the update.
    """

    needs_variables = True

    def __init__(self, schedule: FreezeSchedule | Mapping[str, Any]):
        self._schedule = FreezeSchedule.of(schedule)
        self._updates = CountersByVariables("freeze_updates")

    def get_config(self):
        return {"schedule": self._schedule.get_config()}

    def sent_bytes(self, other_bytes, ranks):
        return None  # depends on the layers that are trained

    def state(self):
        return self._updates.state()

    def create_variables(self, variables, gradients=None):
        self.state()

    def agreed_settings(self, grads_and_vars):
        # A drawn or long sequence is compared by its digest.
        return {"Freeze": str({**self._schedule.get_config(), "sequence": self._schedule.digest()})}

    def select_variables(self, step):
        names = [keras3.name_of(variable) for _, variable in step.grads_and_vars]
        last_groups = self._schedule.last_group_of_each(names)
        step.notes[self] = self._updates.counter_of(step.variables_with_gradient)
        step.group = self._choose_trained_group(step.grads_and_vars, last_groups, step.notes[self])
        if step.losses.is_backward_by_optimizer:
            losses = [*step.losses.values, *step.losses.scaled]
            with tf.name_scope("Freeze"):
                step.grads_and_vars = cut_backward_pass(step.grads_and_vars, last_groups, step.group.number, losses)
        self.each_batch(step)  # so that a caller who clips by the norm sees zeros for frozen variables

    def each_batch(self, step):
        if tf.executing_eagerly():
            is_trained = functools.partial(step.group.trains, number=step.group.number)
            step.grads_and_vars = [
                (grad if grad is None or is_trained(variable) else zero_gradient_like(grad, variable), variable)
                for grad, variable in step.grads_and_vars
            ]

    def gate(self, step, update):
        if step.group is None:
            raise unknown_gradients_error("Freeze", "the variables that this step trains are not known")
        return update()

    def after_update(self, step):
        is_updated = step.is_applied()
        with tf.name_scope("Freeze"), tf.control_dependencies([step.group.number]):
            return step.notes[self].assign_add(tf.cast(is_updated, tf.int64))

    def _choose_trained_group(self, grads_and_vars, last_groups, counter):
        """Returns the group that this step trains.

        Args:
          grads_and_vars: the pairs of the step.
          last_groups: for each pair, the last group that trains its variable.
          counter: the number of earlier updates.
        """
        count = self._schedule.group_count
        frozen = tuple(
            frozenset(variable.ref() for (_, variable), last in zip(grads_and_vars, last_groups) if last < group)
            for group in range(count)
        )
        if not any(grad is not None and last == count - 1 for (grad, _), last in zip(grads_and_vars, last_groups)):
            problem = f"group {count - 1} trains no variable on which the loss depends"
            expected, got = "a gradient in each group", f"no gradient in this group of {len(grads_and_vars)} variables"
            raise ValueError(message("Freeze", problem, expected, got, "Use fewer groups, or pass lists of variables."))
        with tf.name_scope("Freeze"):
            updates, sequence = counter.read_value(), self._schedule.sequence
            if tf.executing_eagerly():
                return TrainedGroup(int(sequence[int(updates) % len(sequence)]), frozen)
            number = tf.gather(tf.constant(sequence), updates % np.int64(len(sequence)))
            return TrainedGroup(tf.cast(number, tf.int32), frozen)
