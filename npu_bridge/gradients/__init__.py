"""Transforms gradients between the backward pass and the update, around any optimizer.

    loss ─► scale_loss ─► backward pass ─► each_batch ─► before_reduce ─► all_reduce ─► after_reduce
                                                                                           │
    after_update ◄─ update ◄─ gate ◄─ apply_gradients ◄─ the caller may clip ◄─────────────┘

The core, in reading order: `step.py` defines `Step`, the data that one training step passes from stage to stage.
`stage.py` defines `Stage`, a transformation with the hooks shown here. `order.py` sorts stages, `recipe.py` chooses
them from options, `pipeline.py` calls the hooks, `inner.py` adapts the optimizer that updates. `optimizer.py` wraps a
pipeline around an optimizer of TensorFlow 1, and `keras/` around a Keras optimizer.

Around the core: `stages/` has a file for each kind of stage. `tailing/` lets updates start early in graphs of other
optimizers. `rank_state.py` keeps variables right on every rank; `checkpoints/` saves and restores, `first_step/`
compares ranks. Stages import `stage.py` and small modules such as `arithmetic.py`, which import no stage; `recipe.py`,
`pipeline.py` and the wrappers import the stages.
"""

from npu_bridge.gradients.optimizer import PipelineOptimizer
from npu_bridge.gradients.pipeline import Pipeline
from npu_bridge.gradients.sharding import ShardedOptimizer
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
