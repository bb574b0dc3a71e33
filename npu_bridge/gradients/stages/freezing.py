"""Freezing layers: many updates train the last layers only, and then cost nothing for the first ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from npu_bridge.base.errors import message
from npu_bridge.gradients.arithmetic import nothing_like
from npu_bridge.gradients.freeze_schedule import FreezeSchedule
from npu_bridge.gradients.graph_mode import state_variable
from npu_bridge.gradients.stage import Stage, gradients_from_elsewhere
from npu_bridge.gradients.stopped_backward import stop_backward


@tf.keras.utils.register_keras_serializable(package="npu_bridge")
class Freeze(Stage):
    """Trains in each update one group of the variables: all of them, or those of the last layers alone.

    The gradients of frozen variables are neither computed nor sent, and neither these variables nor their slots are
    read or changed. There is one set of slots, whatever the group. What a schedule or Adam counts is all updates, as in
    `global_step` or `iterations`, those in which a variable was frozen too.

    The group depends on the number of updates alone, so it is the same on all ranks. Skipped steps do not count, and
    neither do batches that are accumulated.

    `compute_gradients` gives zeros for what is frozen, and sparse gradients without rows. The backward pass ends early
    in graphs and in a `tf.function`, where the optimizer itself computes the gradients (`minimize`, `fit`,
    `compute_gradients`, `Pipeline.gradients`); with gradients of a tape of one's own, executed eagerly, and where XLA
    compiles the whole step, it is complete, and the rest is saved.

    Args:
      schedule: a `FreezeSchedule`, or a dictionary of its arguments.
    Raises:
      TypeError, ValueError: as `FreezeSchedule`; with the first step, where that does not fit the variables.
    Graph: a counter of updates, which is saved; for each group a condition with transfers and one with the update.
    """

    place = "freeze"
    needs_variables = True
    leaves_out = True

    def __init__(self, schedule: FreezeSchedule | Mapping[str, Any]):
        self._schedule = FreezeSchedule.of(schedule)
        self._counter: tf.Variable | None = None

    def __copy__(self):
        return Freeze(self._schedule)

    def get_config(self):
        return {"schedule": self._schedule.get_config()}

    def sent_bytes(self, others, ranks):
        return None  # those of the layers that are trained

    def state(self):
        if self._counter is None:
            self._counter = state_variable(lambda: tf.zeros([], tf.int64), "freeze_updates")
        return {"freeze_updates": self._counter}

    def make_variables(self, variables):
        self.state()

    def describe(self, step, plan):
        config = self._schedule.get_config()
        config["sequence"] = self._schedule.digest()  # what is drawn, or a long list
        plan.settings["Freeze"] = str(config)

    def computed(self, step):
        self._choose(step)
        with tf.name_scope("Freeze"):
            step.grads_and_vars = stop_backward(step.grads_and_vars, self._last_groups(step), step.group, step.losses)

    def collect(self, step):
        if step.group is None:
            self._choose(step)
        if tf.executing_eagerly():
            step.grads_and_vars = [
                (grad if grad is None or step.trains(variable, step.group) else nothing_like(grad, variable), variable)
                for grad, variable in step.grads_and_vars
            ]

    def gate(self, step, apply):
        if step.group is None:
            raise gradients_from_elsewhere("Freeze", "it is not known which variables this step trains")
        return apply()

    def after(self, step):
        counter = self.state()["freeze_updates"]
        is_updated = tf.constant(True) if step.should_apply is None else step.should_apply
        if step.is_due is not None:
            is_updated = tf.logical_and(is_updated, step.is_due)
        with tf.name_scope("Freeze"), tf.control_dependencies([] if tf.executing_eagerly() else [step.group]):
            return counter.assign_add(tf.cast(is_updated, tf.int64))

    def _choose(self, step):
        """Says which group this step trains."""
        last_groups = self._last_groups(step)
        count = self._schedule.group_count
        step.frozen = tuple(
            frozenset(variable.ref() for (_, variable), last in zip(step.grads_and_vars, last_groups) if last < group)
            for group in range(count)
        )
        if not any(grad is not None and last == count - 1 for (grad, _), last in zip(step.grads_and_vars, last_groups)):
            problem = f"group {count - 1} trains no variable on which the loss depends"
            expected, got = "a gradient in each group", f"none in {len(step.grads_and_vars)} variables"
            raise ValueError(message("Freeze", problem, expected, got, "Use fewer groups, or name them in lists."))
        with tf.name_scope("Freeze"):
            updates = self.state()["freeze_updates"].read_value()
            if tf.executing_eagerly():
                step.group = int(self._schedule.sequence[int(updates) % len(self._schedule.sequence)])
            else:
                groups = tf.constant(self._schedule.sequence)
                step.group = tf.cast(tf.gather(groups, updates % np.int64(len(self._schedule.sequence))), tf.int32)

    def _last_groups(self, step):
        return self._schedule.last_groups([variable.name for _, variable in step.grads_and_vars])
