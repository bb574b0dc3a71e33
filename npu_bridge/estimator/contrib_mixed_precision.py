"""Provides `tf.contrib.mixed_precision`, with this package's loss-scale managers and optimizer."""

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
    """An optimizer that scales the loss. A step with a gradient that is not finite changes only the loss scale.

    Args:
      opt: the optimizer to wrap.
      loss_scale_manager: a loss-scale manager of this module.
    """

    def __init__(self, opt, loss_scale_manager):
        super().__init__(opt, loss_scale_manager, is_distributed=False)
