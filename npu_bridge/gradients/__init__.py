"""Gradient transformations between the backward pass and the update, around any optimizer.

`stage.py` defines a transformation (`Stage`) and what one training step hands from one to the next (`Step`); those
there are stand in `stages/`, a file for each kind, and a new one is a new file beside them. `pipeline.py` calls them,
`optimizer.py` puts a pipeline around an optimizer for TensorFlow 1, and `keras/` around Keras optimizers.
"""

from npu_bridge.gradients.optimizer import PipelineOptimizer
from npu_bridge.gradients.pipeline import Pipeline
from npu_bridge.gradients.sharding import ShardedOptimizer
from npu_bridge.gradients.stage import Stage, Step
from npu_bridge.gradients.stages.all_reduce import AllReduce
from npu_bridge.gradients.stages.loss_scaling import LossScaling
from npu_bridge.gradients.stages.overflow import NarrowVariableGuard, OverflowCheck

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
