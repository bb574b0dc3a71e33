"""The stage of group loss scales: unscales and checks the gradients of each group of variables by itself."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from npu_bridge.gradients import collections
from npu_bridge.gradients.arithmetic import in_true_units
from npu_bridge.gradients.graph_mode import building_graph
from npu_bridge.gradients.several_scales import fine_scales, judge, scale_in_common
from npu_bridge.gradients.stage import Stage
from npu_bridge.gradients.stages.loss_scaling import unscale


class GroupScaling(Stage):
    """Takes gradients that have the scale of their variable's group to true units, and judges each group by itself.

    The loss is not multiplied: boundaries between the groups are, in the backward pass. Gradients are sent with one
    scale that all groups have in common.

    Args:
      manager: an object with `get_loss_scale()` giving a float32 vector, `update_loss_scale(finite)` taking a boolean
        one, and `group_of(variable)` giving the position of a variable's group.
      combined: as of `LossScaling`.
    Attributes:
      managers: the manager.
    """

    place = "scale"
    needs_variables = True

    def __init__(self, manager: Any, combined: Any = None):
        self.managers = (manager,)
        self._combined = combined

    def state(self):
        return {"loss_scale": self.managers[0]}

    def describe(self, step, plan):
        (manager,) = self.managers
        plan.settings["loss_scale_manager"] = type(manager).__name__
        plan.settings.update(manager.agreed_constants())

    def collect(self, step):
        (manager,) = self.managers
        groups = [manager.group_of(variable) for _, variable in step.grads_and_vars]
        scales = tf.convert_to_tensor(manager.get_loss_scale())
        scales = tf.raw_ops.DeepCopy(x=scales) if building_graph() else scales
        step.scales = tuple(tf.unstack(scales))
        step.loss_scale = scale_in_common(scales)
        step.multiplied_by(step.loss_scale)
        step.combined = self._combined
        collections.publish(collections.LOSS_SCALE, step.loss_scale)
        pairs = step.grads_and_vars
        for number, scale in enumerate(step.scales):
            own = [grad for group, (grad, _) in zip(groups, pairs) if group == number and grad is not None]
            judge(step, number, own, scale)
        ratios = [scale / step.loss_scale for scale in step.scales]
        step.grads_and_vars = [
            (grad if grad is None else in_true_units(grad, ratios[group]), variable)
            for group, (grad, variable) in zip(groups, pairs)
        ]

    def reduced(self, step):
        unscale(step)

    def after(self, step):
        if not step.judged:  # gradients from elsewhere
            return None
        fine = fine_scales(step)
        return self.managers[0].update_loss_scale(tf.stack([fine[number] for number in range(len(fine))]))
