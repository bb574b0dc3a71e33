"""Multiplies the loss by its loss scale, or makes one scale of those of groups; the pipeline divides by it later."""

from __future__ import annotations

import logging
from typing import Any

from npu_bridge import collective
from npu_bridge.base.errors import message, say_once
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.tf_internals.graphs import current_control_flow_context
from npu_bridge.collective.checks import first_run
from npu_bridge.gradients import collections
from npu_bridge.gradients.arithmetic import map_gradients, unscale_gradient
from npu_bridge.gradients.graph_mode import group_in_graph, is_building_graph, value_before_update
from npu_bridge.gradients.stage import ScalingStage

_UPDATES = ("npu_bridge", "updates_of_scales")  # graph collection: the id of a manager, and an operator that updates it


class ManagedScaling(ScalingStage):
    """Saves the variables of loss-scale managers, and compares the settings of managers between ranks.

    Args:
      managers: the managers, a tuple; also an attribute.
    """

    def __init__(self, managers: tuple):
        self.managers = managers

    def __repr__(self):
        return f"{type(self).__name__}({', '.join(type(manager).__name__ for manager in self.managers)})"

    def state(self):
        names = ["loss_scale", *(f"loss_scale_{number}" for number in range(1, len(self.managers)))]
        return {name: each for name, each in zip(names, self.managers) if isinstance(each, tf.Module)}

    def agreed_settings(self, grads_and_vars):
        settings = {}
        for number, manager in enumerate(self.managers):
            of_loss = f" of loss {number}" if len(self.managers) > 1 else ""
            settings[f"loss_scale_manager{of_loss}"] = type(manager).__name__
            constants = getattr(manager, "agreed_constants", dict)()
            settings.update({f"{name}{of_loss}": value for name, value in constants.items()})
        return settings

    def _record_scales(self, step, scales, common_scale):
        """Records the scales of losses or groups, and the scale by which the sums of their gradients are multiplied."""
        step.losses.scales, step.losses.common_scale = scales, common_scale
        step.record_factor(common_scale)
        collections.publish_in_graph(collections.LOSS_SCALE, common_scale)


class LossScaling(ManagedScaling):
    """Multiplies the loss by the scale of a manager; the pipeline divides the averaged gradients by this scale.

    With several managers, each loss has one, and sums of gradients of several losses have a common scale. Each scale is
    updated from the gradients of its loss; the scale of a loss that takes no part in a step does not change.

    Args:
      manager: an object with two methods, or a list of such objects: `get_loss_scale()` returns a float32 scalar;
        `update_loss_scale(finite)` updates the scale after a step and returns an op (None in eager execution).
    """

    def __init__(self, manager: Any):
        super().__init__(tuple(manager) if isinstance(manager, (list, tuple)) else (manager,))

    def scale_loss(self, loss, step):
        if not step.losses.scales:
            self._read_scales(step)
        loss = tf.convert_to_tensor(loss)
        return loss * tf.cast(step.losses.scales[step.losses.latest], loss.dtype)

    def _read_scales(self, step):
        # Copies: a TF 1 reference variable exposes its own buffer, and a late reader would see the updated value.
        scales = tuple(value_before_update(manager.get_loss_scale()) for manager in self.managers)
        self._record_scales(step, scales, scales[0] if len(scales) == 1 else smallest_scale(scales))

    def each_batch(self, step):
        if len(step.losses.scales) > 1 and not step.losses.usable:  # gradients of one loss, not checked yet
            if len(set(step.losses.numbers)) > 1:
                problem = "losses with different loss scales were differentiated in one pass"
                expected, got = "a pass for each loss", f"one pass for the losses {step.losses.numbers}"
                fix = "Compute the gradients of each loss, and add them by step.add_gradients(grads_and_vars, loss_id)."
                raise ValueError(message("LossScaling", problem, expected, got, fix))
            step.grads_and_vars = step.losses.convert_to_common_scale(step.grads_and_vars, step.losses.latest)

    def after_update(self, step):
        if step.losses.usable:
            right = step.losses.find_scales_without_overflow(step.should_apply, step.is_due)
            moved = [self.managers[number].update_loss_scale(is_right) for number, is_right in right.items()]
            return _record_update([self.managers[number] for number in right], group_in_graph(*moved))
        manager, is_unchecked = self.managers[step.losses.latest], step.should_apply is None
        updated = step.run_when_due(
            lambda: manager.update_loss_scale(tf.constant(True) if is_unchecked else step.should_apply)
        )
        return _record_update([manager], updated)


class GroupScaling(ManagedScaling):
    """Checks gradients that are multiplied by the loss scale of their variable's group, and gives them a common scale.

    Gradients, not the loss, are multiplied by the scales: at the boundaries between groups in the backward pass. They
    get the common scale before they are sent; the pipeline divides the averaged gradients by this scale.

    Args:
      manager: an object with these methods: `get_loss_scale()` returns a float32 vector, `update_loss_scale(finite)`
        takes a boolean vector, and `group_of(variable)` returns the position of a variable's group. Its attribute
        `has_last_boundary` is True once a backward pass of the graph has scaled gradients. `use_at_boundaries()` makes
        boundaries in the current graph use this manager.
    """

    needs_variables = True

    def __init__(self, manager: Any):
        super().__init__((manager,))
        manager.use_at_boundaries()

    def each_batch(self, step):
        (manager,) = self.managers
        groups = [manager.group_of(variable) for _, variable in step.grads_and_vars]
        if not manager.has_last_boundary:
            problem, expected = "no gradient was multiplied by the scale of its group", "a boundary on the last outputs"
            fix = "Write scale_boundary(outputs, n, 0) on the outputs of the last of n groups."
            raise ValueError(message(type(manager).__name__, problem, expected, "gradients without it", fix))
        scales = value_before_update(manager.get_loss_scale())
        self._record_scales(step, tuple(tf.unstack(scales)), smallest_scale(scales))
        losses, pairs = step.losses, step.grads_and_vars
        for number, scale in enumerate(losses.scales):
            of_group = [grad for group, (grad, _) in zip(groups, pairs) if group == number and grad is not None]
            losses.record_finiteness(number, of_group, scale)
        ratios = [scale / losses.common_scale for scale in losses.scales]
        converted = map_gradients(
            lambda position, grad: unscale_gradient(grad, ratios[groups[position]]), [grad for grad, _ in pairs]
        )
        step.grads_and_vars = [(grad, variable) for grad, (_, variable) in zip(converted, pairs)]

    def after_update(self, step):
        if not step.losses.usable:  # gradients that did not pass this pipeline
            return None
        right = step.losses.find_scales_without_overflow(step.should_apply, step.is_due)
        return self.managers[0].update_loss_scale(tf.stack([right[number] for number in range(len(right))]))


def _record_update(managers, updated):
    """Adds a check of runs if the graph updates a moving scale twice; returns the update."""
    graph = tf.compat.v1.get_default_graph()
    # Updates in branches of one condition never run together.
    if is_building_graph() and current_control_flow_context(graph) is None:
        updates = graph.get_collection_ref(_UPDATES)
        updates += [(id(each), getattr(updated, "op", updated)) for each in managers if getattr(each, "variables", ())]
        if len(dict(updates)) < len(updates):
            first_run.find_or_add_check(graph, _UPDATES, lambda: _OneUpdateCheck(updates))
    return updated


class _OneUpdateCheck(first_run.FirstRunCheck):
    """Refuses runs that update one moving scale twice, each from the same start value; with one rank, warns of them."""

    def __init__(self, updates: list):
        super().__init__()
        self._updates = updates

    def is_due(self, session):
        return True

    def is_needed_for(self, run):
        managers = [manager for manager, updated in self._updates if updated in run.op_set]
        return len(set(managers)) < len(managers)

    def make_check(self, session, run):
        problem = "one run changes a loss scale twice from the same start value, so an overflow can be forgotten"
        expected, got = "one step in a run for each moving scale", f"two steps in the run of {run.name}"
        fix = "Run the steps in separate calls of session.run, or make an optimizer and a manager for each."
        text = message("loss_scale_manager", problem, expected, got, fix)
        if collective.current().size > 1:  # the scales of ranks would differ
            raise ValueError(text)
        say_once(logging.WARNING, text)


def smallest_scale(scales: Any) -> tf.Tensor:
    """Returns the scale for sums of gradients: the minimum of the scales, but at least 1.

    With the minimum, no term grows beyond its dtype. Below 1, small terms of other losses would lose bits.
    """
    return tf.maximum(tf.reduce_min(tf.convert_to_tensor(scales)), 1.0)
