"""Scales the loss, and divides the reduced gradients by the scale."""

from __future__ import annotations

import logging
import weakref
from typing import Any

from npu_bridge.base.errors import message, say_once
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.gradients import collections
from npu_bridge.gradients.arithmetic import in_true_units
from npu_bridge.gradients.graph_mode import building_graph
from npu_bridge.gradients.losses import smallest_scale
from npu_bridge.gradients.stage import Stage, Step

_first_users = weakref.WeakKeyDictionary()  # the stage that used each manager first


def unscale(step: Step, combined: Any) -> None:
    """Converts the gradients of a step to true units, in flat tensors where `combined` joins them."""
    if combined is None or step.divisor is None:
        step.map(lambda grad: in_true_units(grad, step.divisor))
    else:
        combined.unscale(step)
    step.divisor = None


class LossScaling(Stage):
    """Multiplies the loss by the manager's scale and divides the combined gradients by it.

    With several managers there is a loss for each, and sums of their gradients have a common scale. A scale grows or
    shrinks by the gradients of its own loss; a manager whose loss takes no part in a step is left unchanged.

    Args:
      manager: an object with `get_loss_scale()` returning a float32 scalar, and `update_loss_scale(finite)` that moves
        the scale after a step and returns an op (None when executed eagerly); or a list of them.
      combined: a `CombinedGradients` to divide many gradients at once; None to divide each by itself.
    Attributes:
      managers: all of them.
    """

    place = "scale"
    scales_loss = True

    def __init__(self, manager: Any, combined: Any = None):
        self.combined = combined
        self.managers = tuple(manager) if isinstance(manager, (list, tuple)) else (manager,)

    def __repr__(self):
        return f"LossScaling({', '.join(type(manager).__name__ for manager in self.managers)})"

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

    def scale_loss(self, loss, step):
        if not step.losses.scales:
            self._read_scales(step)
        loss = tf.convert_to_tensor(loss)
        return loss * tf.cast(step.losses.scales[step.losses.latest], loss.dtype)

    def _read_scales(self, step):
        self._warn_of_sharing()
        scales = [tf.convert_to_tensor(manager.get_loss_scale()) for manager in self.managers]
        # A TF 1 reference variable exposes its own buffer: a late reader would see the value after the update.
        scales = tuple(tf.raw_ops.DeepCopy(x=scale) if building_graph() else scale for scale in scales)
        step.losses.scales = scales
        step.losses.common_scale = scales[0] if len(scales) == 1 else smallest_scale(scales)
        step.multiplied_by(step.losses.common_scale)
        collections.publish(collections.LOSS_SCALE, step.losses.common_scale)

    def accumulate(self, step):
        if len(step.losses.scales) > 1 and not step.losses.usable:  # gradients of one loss, not judged yet
            step.grads_and_vars = step.losses.convert_to_common_scale(step.grads_and_vars, step.losses.latest)

    def after_reduce(self, step):
        unscale(step, self.combined)

    def after_update(self, step):
        if step.losses.usable:
            right = step.losses.scales_without_overflow(step.should_apply, step.is_due)
            moved = [self.managers[number].update_loss_scale(is_right) for number, is_right in right.items()]
            return None if tf.executing_eagerly() else tf.group(*moved)
        manager, is_unchecked = self.managers[step.losses.latest], step.should_apply is None
        return step.run_when_due(
            lambda: manager.update_loss_scale(tf.constant(True) if is_unchecked else step.should_apply)
        )

    def _warn_of_sharing(self):
        for manager in self.state().values() if building_graph() else ():
            if not manager.variables:
                continue
            first = _first_users.get(manager, lambda: None)()
            if first is None:
                _first_users[manager] = weakref.ref(self)
            elif first is not self:
                problem = (
                    "two optimizers share a manager; in one run nothing orders their updates, and ranks may differ"
                )
                expected = "one for each, or optimizers that train in runs of their own"
                fix = "Make a manager for each."
                kind = type(manager).__name__
                say_once(logging.WARNING, message("loss_scale_manager", problem, expected, f"one {kind}", fix))
