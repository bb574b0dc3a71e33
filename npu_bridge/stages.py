"""What can happen to gradients between the backward pass and the update: the stages that optimizers take as `stages`.

    NPUOptimizer(opt, manager, is_distributed=True, is_loss_scale=True, stages=[Accumulate(4), ClipByGlobalNorm(1.0)])

They stand in one order, whatever the order of the list; docs/stages.md shows it. A loop of your own around a
`tf.GradientTape` uses `pipeline`.
"""

from npu_bridge.gradients.explanation import explain
from npu_bridge.gradients.pipeline import Pipeline
from npu_bridge.gradients.recipe import pipeline_of as pipeline
from npu_bridge.gradients.stage import PLACES, Stage, Step
from npu_bridge.gradients.stages.accumulation import Accumulate
from npu_bridge.gradients.stages.adasum import Adasum
from npu_bridge.gradients.stages.centralisation import CentralizeGradients
from npu_bridge.gradients.stages.clipping import ClipByGlobalNorm, ClipByValue, ClipLocally
from npu_bridge.gradients.stages.partial_sync import PartialSync
from npu_bridge.gradients.stages.sparsification import Threshold, TopK
from npu_bridge.gradients.sync import sync_all

__all__ = [
    "PLACES",
    "Accumulate",
    "Adasum",
    "CentralizeGradients",
    "ClipByGlobalNorm",
    "ClipByValue",
    "ClipLocally",
    "PartialSync",
    "Pipeline",
    "Stage",
    "Step",
    "Threshold",
    "TopK",
    "explain",
    "pipeline",
    "sync_all",
]
