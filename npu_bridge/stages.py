"""Lists the stages through which gradients can go to the update; pass them to optimizers as `stages`.

    NPUOptimizer(opt, manager, is_distributed=True, is_loss_scale=True, stages=[Accumulate(4), ClipByGlobalNorm(1.0)])

The stages run in a fixed order, regardless of the order of the list; docs/stages.md shows the order. A custom loop
around a `tf.GradientTape` uses `pipeline`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from npu_bridge.base.files import write_atomically
from npu_bridge.base.lazy import import_module_or_object
from npu_bridge.gradients.checkpoints.sync import SyncBeforeSavingHook, sync_all
from npu_bridge.gradients.explanation import format_stage_rows, list_stages
from npu_bridge.gradients.from_config import make_stages
from npu_bridge.gradients.inner.families import adapt_optimizer
from npu_bridge.gradients.pipeline import Pipeline
from npu_bridge.gradients.recipe import PipelineSettings, build_pipeline
from npu_bridge.gradients.stage import PLACES, LossStage, ReducingStage, Stage
from npu_bridge.gradients.stages.accumulation import Accumulate
from npu_bridge.gradients.stages.adasum import Adasum
from npu_bridge.gradients.stages.centralisation import CentralizeGradients
from npu_bridge.gradients.stages.clipping import ClipByGlobalNorm, ClipByValue, ClipLocally
from npu_bridge.gradients.stages.freeze_schedule import FreezeSchedule
from npu_bridge.gradients.stages.freezing import Freeze
from npu_bridge.gradients.stages.partial_sync import PartialSync
from npu_bridge.gradients.stages.sparsification import Threshold, TopK
from npu_bridge.gradients.step import Step

__all__ = [
    "PLACES",
    "Accumulate",
    "Adasum",
    "CentralizeGradients",
    "ClipByGlobalNorm",
    "ClipByValue",
    "ClipLocally",
    "Freeze",
    "FreezeSchedule",
    "LossStage",
    "PartialSync",
    "Pipeline",
    "ReducingStage",
    "Stage",
    "Step",
    "SyncBeforeSavingHook",
    "Threshold",
    "TopK",
    "explain",
    "from_config",
    "pipeline",
    "sync_all",
]


def from_config(config: Mapping[str, Any]) -> list[Stage]:
    """Makes stages from plain data, such as the content of a TOML or JSON file.

    Args:
      config: `{"stages": [{"stage": "Accumulate", "steps": 4}, ...]}`: the name of each class, and its arguments. A
        class of your own can be named once it is defined.
    Raises:
      TypeError, ValueError: a stage or an argument is unknown, missing or illegal; the message suggests a similar name.
    """
    classes = [each for each in map(globals().get, __all__) if isinstance(each, type) and issubclass(each, Stage)]
    return make_stages(config, [each for each in classes if each.__module__ != Stage.__module__])  # no base class


def pipeline(
    name: str,
    manager: Any = None,
    is_distributed: bool = False,
    stages: Sequence[Stage] = (),
    inner: Any = None,
    **settings: Any,
) -> Pipeline:
    """Builds a pipeline, for example for a loop around a `tf.GradientTape`.

    Args:
      name: prefix of the names of collectives; the same on every rank.
      manager: the loss-scale manager, or a list of managers, one for each loss; None for no loss scaling.
      is_distributed: average the gradients over the ranks.
      stages: stages to add. They are copied, so one list can serve several optimizers.
      inner: the optimizer that updates, of any family; ranks then compare its slots before the first step.
      **settings: further attributes of `PipelineSettings`, such as `is_joint`, `is_tailing_optimization` and `wire`.
    Raises:
      TypeError: a setting is unknown, `stages` is not a list of stages, or `inner` is not an optimizer.
      ValueError: the stages cannot be ordered.
    """
    if inner is not None:
        inner = adapt_optimizer(inner, settings.get("owner", "Pipeline"), applies_updates=False)
    return build_pipeline(
        PipelineSettings(name, manager, is_distributed=is_distributed, stages=stages, inner=inner, **settings)
    )


def explain(optimizer: Any, svg: str | None = None, ranks: int | None = None) -> str:
    """Describes the stages through which gradients pass, in order.

    Args:
      optimizer: an optimizer with stages, or a pipeline. If optimizers are nested, the stages of the outermost come
        last, because gradients reach these stages last.
      svg: a file for a picture of the stages. An existing file is overwritten only if it is such a picture.
      ranks: number of ranks with which to count bytes; by default the number of ranks of this job.
    Returns:
      A text with a line for each stage: its number, place, class and arguments, and its needs and guarantees. With
      several ranks, also the bytes that a rank sends for each float32 parameter and batch.
    Raises:
      TypeError: the optimizer has no stages.
      OSError: the file cannot be written, or holds other data.
    """
    stops = list_stages(optimizer, ranks)
    if svg is not None:
        draw_stages = import_module_or_object("npu_bridge.reporting.stages_picture:draw_stages")
        write_atomically(
            svg, draw_stages(stops), import_module_or_object("npu_bridge.reporting.picture_style:PICTURE_FILES")
        )
    return format_stage_rows(stops)


import_module_or_object("npu_bridge.estimator")  # as after other imports that need TensorFlow
