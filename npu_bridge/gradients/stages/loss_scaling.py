"""Loss scaling: keeps small gradients representable while they are computed and transferred."""

from __future__ import annotations

import logging
import weakref

import tensorflow as tf

from npu_bridge.gradients import collections
from npu_bridge.gradients.arithmetic import in_true_units
from npu_bridge.gradients.graph_mode import building_graph
from npu_bridge.gradients.stage import Stage
from npu_bridge.options.errors import message, say_once

_first_users = weakref.WeakKeyDictionary()  # the stage that each manager was used in first


class LossScaling(Stage):
    """Multiplies the loss by the manager's scale and divides the combined gradients by it.

    Args:
      manager: an object with `get_loss_scale()` giving a float32 scalar, and `update_loss_scale(finite)` that moves
        the scale on after a step and returns an op (None when executed eagerly).
    """

    place = "scale"
    scales_loss = True

    def __init__(self, manager):
        self._manager = manager

    def state(self):
        return {"loss_scale": self._manager} if isinstance(self._manager, tf.Module) else {}

    def begin(self, step):
        self._warn_of_sharing()
        scale = tf.convert_to_tensor(self._manager.get_loss_scale())
        # A TF 1 reference variable gives out its own buffer: a late reader would see the value after the update.
        step.loss_scale = tf.raw_ops.DeepCopy(x=scale) if building_graph() else scale
        step.multiplied_by(step.loss_scale)
        collections.publish(collections.LOSS_SCALE, step.loss_scale)

    def describe(self, step, plan):
        plan.settings["loss_scale_manager"] = type(self._manager).__name__
        plan.settings.update(getattr(self._manager, "agreed_constants", dict)())

    def scale(self, loss, step):
        return loss * tf.cast(step.loss_scale, loss.dtype)

    def reduced(self, step):
        step.map(lambda grad: in_true_units(grad, step.divisor))
        step.divisor = None

    def after(self, step):
        is_unchecked = step.should_apply is None
        return step.run_when_due(
            lambda: self._manager.update_loss_scale(tf.constant(True) if is_unchecked else step.should_apply)
        )

    def _warn_of_sharing(self):
        if not building_graph() or not self.state() or not self._manager.variables:
            return
        first = _first_users.get(self._manager, lambda: None)()
        if first is None:
            _first_users[self._manager] = weakref.ref(self)
        elif first is not self:
            problem = "two optimizers share a manager; in one run nothing orders their updates, and ranks may differ"
            expected = "one for each, or optimizers that train in runs of their own"
            mend = "Make a manager for each."
            kind = type(self._manager).__name__
            say_once(logging.WARNING, message("loss_scale_manager", problem, expected, f"one {kind}", mend))
