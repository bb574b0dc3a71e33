"""A training step is a gradient's journey; every feature is one stop on it.

`stage.py` defines a stop (`Stage`) and what travels (`Step`), `pipeline.py` runs a list of stages, `optimizer.py`
puts a pipeline around somebody else's optimizer. The stages: `loss_scaling.py`, `all_reduce.py`, `overflow.py` and
`narrow_variables.py`. A new feature is a new file beside them.
"""

from npu_bridge.gradients.optimizer import PipelineOptimizer
from npu_bridge.gradients.pipeline import Pipeline
from npu_bridge.gradients.sharding import ShardedOptimizer, SharedUpdate
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
    "SharedUpdate",
    "Stage",
    "Step",
]
