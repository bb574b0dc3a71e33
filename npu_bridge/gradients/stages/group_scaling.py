"""Checks the gradients of each group of variables separately, for loss scales of groups."""

from __future__ import annotations

from typing import Any

from npu_bridge.base.errors import message
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.gradients.arithmetic import map_gradients, unscale_gradient
from npu_bridge.gradients.graph_mode import value_before_update
from npu_bridge.gradients.stages.loss_scaling import ManagedScaling, smallest_scale


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
