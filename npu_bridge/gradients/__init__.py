"""Transforms gradients between the backward pass and the update, around any optimizer.

    loss ─► scale_loss ─► backward pass ─► each_batch ─► before_reduce ─► all_reduce ─► after_reduce
                                                                                           │
    after_update ◄─ update ◄─ gate ◄─ apply_gradients ◄─ the caller may clip ◄─────────────┘

`docs/one_step.md` follows a step function by function, and `docs/architecture.md` describes the modules. Stages import
`stage.py` and modules such as `arithmetic.py`, which import no stage; `recipe.py` and the wrappers import the stages.
"""

from npu_bridge.gradients.inner.sharding import ShardedOptimizer
from npu_bridge.gradients.optimizer import PipelineOptimizer
from npu_bridge.gradients.pipeline import Pipeline
from npu_bridge.gradients.stage import Stage
from npu_bridge.gradients.stages.all_reduce import AllReduce
from npu_bridge.gradients.stages.loss_scaling import LossScaling
from npu_bridge.gradients.stages.overflow import NarrowVariableGuard, OverflowCheck
from npu_bridge.gradients.step import Step

__all__ = [
    "AllReduce",
    "LossScaling",
    "NarrowVariableGuard",
    "OverflowCheck",
    "Pipeline",
    "PipelineOptimizer",
    "ShardedOptimizer",
    "Stage",
    "Step",
]
