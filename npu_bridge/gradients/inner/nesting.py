"""Checks optimizers of this package that wrap one another."""

from __future__ import annotations

from typing import Any

from npu_bridge.base.errors import message
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.gradients.inner.interface import is_distributed
from npu_bridge.gradients.order import name_of_stage
from npu_bridge.gradients.pipeline import Pipeline
from npu_bridge.gradients.stage import changes_gradients


def check_nesting(owner: str, pipeline: Pipeline, optimizer: Any, within: Pipeline | None) -> None:
    """Checks that a pipeline and the one of the optimizer inside of it run their stages in the right order, and once.

    Args:
      owner: name of the outer optimizer, for messages.
      pipeline: the pipeline of the outer optimizer.
      optimizer: the optimizer inside.
      within: the pipeline of `optimizer`, or None.
    Raises:
      ValueError: they do not.
    """
    if pipeline.scales_gradients and within is not None and _needs_unscaled_gradients(within):
        names = ", ".join(map(name_of_stage, within.stages))
        problem = "the stages of the inner optimizer would get gradients that are still multiplied by the loss scale"
        fix = "Write NPUOptimizer(opt, manager, is_distributed=True, is_loss_scale=True, stages=[...])."
        expected = "the order scale, accumulate, reduce, unscale, verdict, clip, update"
        raise ValueError(message(owner, problem, expected, f"{names} inside this optimizer", fix))
    if pipeline.scales_gradients and within is not None and within.decides_about_steps:
        pipeline.check_scaled_gradients()
    updating, part = optimizer, within
    while part is not None:
        updating = part.inner.optimizer
        part = vars(updating).get("_pipeline") if isinstance(updating, tf.compat.v1.train.Optimizer) else None
    if isinstance(updating, tf.compat.v1.train.SyncReplicasOptimizer) and pipeline.can_skip_updates:
        problem = "SyncReplicasOptimizer updates in a separate thread, where no step can be skipped"
        expected = "the optimizer inside SyncReplicasOptimizer"
        fix = "Write NPUOptimizer(opt, manager, is_distributed=True, is_loss_scale=True) without SyncReplicasOptimizer."
        raise ValueError(message(owner, problem, expected, "SyncReplicasOptimizer", fix))
    if not pipeline.communicates:
        return
    if is_distributed(optimizer):
        raise ValueError(
            f"{owner}: the gradients would be averaged over the ranks twice. Expected one distributed optimizer; got "
            f"{type(optimizer).__name__} inside {owner}. Pass the optimizer that {type(optimizer).__name__} wraps."
        )
    if within is None:
        return
    check_can_average_results(within, owner)
    if within.scales_gradients and not pipeline.only_communicates:
        raise ValueError(
            f"{owner}: loss scaling must be outside the reduction. Expected the order loss scale, reduce, unscale, "
            f"check, update; got {type(optimizer).__name__} inside {owner}. Write "
            f"NPULossScaleOptimizer(NPUDistributedOptimizer(opt), manager, is_distributed=True), or one NPUOptimizer."
        )
    within.skip_steps_together()


def check_can_average_results(pipeline: Pipeline, owner: str) -> None:
    """Checks that no stage of an optimizer changes gradients that `owner` averages only afterwards.

    Raises:
      ValueError: a stage would change the gradients of each rank.
    """
    changing = [name_of_stage(stage) for stage in pipeline.stages if changes_gradients(stage, ["after_reduce"])]
    if changing:
        problem = f"{changing[0]} would change the gradients of each rank, and not their mean"
        expected, got = "the stages of the optimizer that averages gradients", f"stages of the optimizer inside {owner}"
        fix = "Write NPUOptimizer(opt, is_distributed=True, stages=[...])."
        raise ValueError(message(owner, problem, expected, got, fix))


def _needs_unscaled_gradients(pipeline):
    return any(stage.needs_unscaled_gradients or changes_gradients(stage) for stage in pipeline.stages)
