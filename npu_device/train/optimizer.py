"""Adds loss scaling to a Keras optimizer."""

from __future__ import annotations

from typing import Any

from npu_bridge.base.arguments import check_count, check_number, check_switch
from npu_bridge.base.errors import message
from npu_bridge.estimator.npu.npu_loss_scale_manager import ExponentialUpdateLossScaleManager, FixedLossScaleManager
from npu_bridge.gradients.keras.optimizer import wrap_keras_optimizer
from npu_bridge.gradients.keras.settings import KerasSettings
from npu_bridge.gradients.keras.shared import LossScaleMixin, OptimizerMaker
from npu_bridge.gradients.scale_rule import LARGEST_SCALE, check_scale
from npu_bridge.operators.unavailable import unavailable_function

__all__ = ["NpuLossScaleOptimizer"]

_INITIAL_SCALE, _GROWTH_STEPS = 2.0**15, 2000


class NpuLossScaleOptimizer(OptimizerMaker):
    """A Keras optimizer that scales the loss, and skips steps whose gradients overflow on some rank.

    The instance is both a `tf.keras.mixed_precision.LossScaleOptimizer` and an optimizer of the generation of
    `inner_optimizer` (Keras or legacy). Pass it to `model.compile`, or call its `get_scaled_loss` and
    `get_unscaled_gradients` around a `tf.GradientTape`. A skipped step changes no variable, and counts in both
    `iterations` and `skipped_steps`; `last_step_finite` tells whether the last step was applied. Gradients are averaged
    over the ranks only if `inner_optimizer` (`npu_distributed_keras_optimizer_wrapper`) or the script averages them.

    Args:
      inner_optimizer: a `tf.keras.optimizers.Optimizer` or `tf.keras.optimizers.legacy.Optimizer`.
      dynamic: whether the scale doubles after `dynamic_growth_steps` steps in a row without overflow, up to 3.4e38, and
        halves after an overflow, down to 1. False keeps the scale constant.
      initial_scale: scale of the first step, above 0; default: 2**15. Required, and at least 1, if `dynamic` is False.
      dynamic_growth_steps: an integer of at least 1; default: 2000.
    Raises:
      TypeError: `inner_optimizer` is not a Keras optimizer, or another argument has the wrong type.
      ValueError: `inner_optimizer` already scales the loss, a number is out of range, or the arguments contradict each
        other.
    """

    def __new__(
        cls,
        inner_optimizer: Any,
        dynamic: bool = True,
        initial_scale: float | None = None,
        dynamic_growth_steps: int | None = None,
    ):
        manager = _make_scale_manager(dynamic, initial_scale, dynamic_growth_steps)
        settings = KerasSettings(
            cls.__name__, manager, is_distributed=False, decides_together=True, counts_skipped_steps=True
        )
        return wrap_keras_optimizer(inner_optimizer, settings, cls.__name__)


NpuLossScaleOptimizer.register(LossScaleMixin)

NpuExperimentalLossScaleOptimizer = unavailable_function(
    "NpuExperimentalLossScaleOptimizer", "a wrapper of a class that Keras has removed", "Use NpuLossScaleOptimizer."
)


def _make_scale_manager(dynamic, initial_scale, growth_steps):
    where = "NpuLossScaleOptimizer"
    check_switch(where, "dynamic", dynamic, "Pass the arguments by name.")
    if dynamic:
        scale = _INITIAL_SCALE if initial_scale is None else initial_scale
        steps = _GROWTH_STEPS if growth_steps is None else growth_steps
        scale, steps = check_scale(where, "initial_scale", scale), check_count(where, "dynamic_growth_steps", steps)
        return ExponentialUpdateLossScaleManager(scale, steps, 1, 2, 0.5)
    if initial_scale is None:
        fix = "Pass initial_scale=2**15, for example."
        raise ValueError(message(where, "initial_scale is missing", "a number with dynamic=False", "None", fix))
    if growth_steps is not None:
        fix = "Leave it out, or pass dynamic=True."
        problem = "dynamic_growth_steps does not fit a fixed scale"
        raise ValueError(message(where, problem, "None", repr(growth_steps), fix))
    return FixedLossScaleManager(check_number(where, "initial_scale", initial_scale, at_least=1, at_most=LARGEST_SCALE))
