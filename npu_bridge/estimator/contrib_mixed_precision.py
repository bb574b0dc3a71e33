"""Provides `tf.contrib.mixed_precision`: loss scaling by the managers and the optimizer of this package."""

from __future__ import annotations

from npu_bridge.estimator.npu.npu_loss_scale_manager import (
    ExponentialUpdateLossScaleManager,
    FixedLossScaleManager,
    LossScaleManager,
)
from npu_bridge.estimator.npu.npu_loss_scale_optimizer import NPULossScaleOptimizer

__all__ = [
    "ExponentialUpdateLossScaleManager",
    "FixedLossScaleManager",
    "LossScaleManager",
    "LossScaleOptimizer",
]


class LossScaleOptimizer(NPULossScaleOptimizer):
    """Trains with a scaled loss; a step with a gradient that is not finite changes only the scale.

    Args:
      opt: the optimizer that it wraps.
      loss_scale_manager: a manager of this module.
    """

    def __init__(self, opt, loss_scale_manager):
        super().__init__(opt, loss_scale_manager, is_distributed=False)
