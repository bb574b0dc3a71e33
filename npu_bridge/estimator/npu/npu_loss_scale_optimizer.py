"""Defines the optimizer that only scales the loss."""

from __future__ import annotations

from npu_bridge.base.arguments import check_switch
from npu_bridge.estimator.npu.npu_loss_scale_manager import FixedLossScaleManager, advice_for_scale, check_manager
from npu_bridge.gradients import PipelineOptimizer
from npu_bridge.gradients.inner.families import adapt_optimizer
from npu_bridge.gradients.recipe import PipelineSettings, build_pipeline

__all__ = ["FixedLossScaleManager", "NPULossScaleOptimizer"]


class NPULossScaleOptimizer(PipelineOptimizer):
    """Adds loss scaling to any optimizer, but does not average gradients over the ranks.

    For several ranks, wrap a distributed optimizer and set `is_distributed`:
    `NPULossScaleOptimizer(NPUDistributedOptimizer(opt), manager, is_distributed=True)`.

    Args:
      opt: as `opt` of `NPUOptimizer`.
      loss_scale_manager: a `LossScaleManager`, or a list of managers, one for each loss. With a
        `FixedLossScaleManager` of `enable_overflow_check=False`, every step is applied, even with Inf or NaN gradients.
      is_distributed: skip a step on all ranks if gradients overflow on any rank.
    Raises:
      TypeError: `opt` is not an optimizer, `loss_scale_manager` is not a manager, or `is_distributed` is not True or
        False.
      ValueError: `loss_scale_manager` is None.
    """

    other_keywords = {"loss_scale": advice_for_scale}

    def __init__(self, opt, loss_scale_manager, is_distributed=False):
        name = "NPULossScaleOptimizer" + type(opt).__name__
        check_manager("NPULossScaleOptimizer", loss_scale_manager)
        is_distributed = check_switch("NPULossScaleOptimizer", "is_distributed", is_distributed, takes_numbers=True)
        managers = loss_scale_manager if isinstance(loss_scale_manager, (list, tuple)) else [loss_scale_manager]
        settings = PipelineSettings(
            name,
            manager=loss_scale_manager,
            is_checked=any(getattr(manager, "get_enable_overflow_check", lambda: True)() for manager in managers),
            # Ranks that share the work of an update must all apply it.
            is_joint=is_distributed or getattr(opt, "is_weight_update_sharding", False),
            inner=adapt_optimizer(opt, "NPULossScaleOptimizer", saved_as=self),
            owner="NPULossScaleOptimizer",
        )
        super().__init__(opt, build_pipeline(settings), name)
