"""Chooses the stages of an optimizer's pipeline from the optimizer's options."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

from npu_bridge.base.arguments import check_list
from npu_bridge.base.errors import message
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.collective import wire as wire_formats
from npu_bridge.gradients.combined import CombinedGradients
from npu_bridge.gradients.inner.interface import InnerOptimizer
from npu_bridge.gradients.inner.sharding import SharedUpdate
from npu_bridge.gradients.order import check_stage
from npu_bridge.gradients.pipeline import Pipeline
from npu_bridge.gradients.stage import (
    REDUCED_GRADIENTS,
    VERDICT,
    ExchangingStage,
    ReducingStage,
    SelectingStage,
    Stage,
    SummingStage,
    changes_gradients,
)
from npu_bridge.gradients.stages.all_reduce import AllReduce
from npu_bridge.gradients.stages.loss_scaling import GroupScaling, LossScaling
from npu_bridge.gradients.stages.overflow import NarrowVariableGuard, OverflowCheck
from npu_bridge.gradients.stages.skip_record import DroppedStepWarning


@dataclasses.dataclass(frozen=True)
class PipelineSettings:
    """The settings of an optimizer's pipeline.

    Attributes:
      name: name of the optimizer, and prefix of the names of its collectives.
      manager: the loss-scale manager, or a list of managers, one for each loss; None for no loss scaling.
      is_checked: skip steps whose gradients overflow; used with a manager.
      is_distributed: average gradients over the ranks.
      is_joint: skip a step on all ranks if gradients overflow on one. None means True if the pipeline exchanges
        gradients that can overflow, or if the update is sharded.
      is_tailing_optimization: decide early whether to skip the step, while the last fragment is not yet all-reduced;
        used on several ranks, if each rank checks its own gradients.
      wire: format in which gradients are sent: "none", "float16" or "bfloat16".
      is_sharded: whether the weight update is sharded over the ranks.
      stages: stages that the user adds. They are copied, so one list can serve several optimizers.
      record: a stage that records skipped steps; used with a manager.
      first_parameters: positions of the parameters at which all-reduce fragments begin; None for the split of the
        process.
      combines: join gradients into flat tensors; used with a manager.
      checks_combined: compare the flat tensors with the single gradients in every step.
      inner: the optimizer that updates, of any family.
      owner: name of the optimizer's class, for messages.
    """

    name: str
    manager: Any = None
    is_checked: bool = True
    is_distributed: bool = False
    is_joint: bool | None = None
    is_tailing_optimization: bool = False
    wire: str | None = "none"
    is_sharded: bool = False
    stages: Sequence[Stage] = ()
    record: Stage | None = None
    first_parameters: tuple | None = None
    combines: bool = False
    checks_combined: bool = False
    inner: InnerOptimizer | None = None
    owner: str = "Pipeline"

    def __post_init__(self):
        wire_formats.wire_dtype(self.wire, self.owner)  # checks it

    @property
    def wire_dtype(self) -> tf.DType | None:
        """The 16-bit dtype to which gradients are rounded before the all-reduce, or None."""
        return wire_formats.wire_dtype(self.wire, self.owner)

    @property
    def is_scaled(self) -> bool:
        """Whether gradients are multiplied by a loss scale."""
        return self.manager is not None


def build_pipeline(settings: PipelineSettings) -> Pipeline:
    """Builds the pipeline of one optimizer.

    Raises:
      TypeError: `settings.stages` is not a list of stages.
      ValueError: the stages cannot be ordered, or do not fit the optimizer.
    """
    added, inner = copy_stages(settings.stages, settings.owner), settings.inner
    _check_uses_loss_of_step(inner, added, settings.owner)
    _check_accumulation_of_keras(inner, added, settings)
    exchanging = next((stage for stage in added if isinstance(stage, ExchangingStage)), None)
    if exchanging is not None:
        _check_communicating_stage(exchanging, settings, getattr(inner, "optimizer", None))
    combined = _make_combined_gradients(settings, inner)
    made = _make_scaling_stages(settings)
    if settings.is_distributed and exchanging is None:
        made.append(AllReduce(settings.name, settings.wire_dtype))
    if _needs_check(settings, added):
        made += _make_checking_stages(settings, exchanging, combined)
    if settings.is_sharded:
        made.append(SharedUpdate())
    for stage in (*made, *added):
        if isinstance(stage, ExchangingStage):
            stage.bind(settings.name, settings.first_parameters)
    return Pipeline([*made, *added], inner, settings.owner, combined)


def _check_uses_loss_of_step(inner, added, owner):
    """Rejects stages beside an optimizer that evaluates the loss of a step, if its gradients are not of this loss."""
    if not hasattr(getattr(inner, "optimizer", None), "set_unscaled_loss"):
        return
    for stage in added:
        if isinstance(stage, (SelectingStage, SummingStage, ExchangingStage)):
            name = type(inner.optimizer).__name__
            problem = (
                f"{name} needs the averaged gradients of the loss of each step, which {type(stage).__name__} changes"
            )
            expected, fix = "stages that only transform gradients", f"Leave {type(stage).__name__} or {name} out."
            raise ValueError(message(owner, problem, expected, repr(stage), fix))


def _check_accumulation_of_keras(inner, added, settings):
    """Rejects stages that leave variables out, and counts of skipped steps, if Keras 3 accumulates gradients."""
    steps = getattr(getattr(inner, "optimizer", None), "gradient_accumulation_steps", None)
    counts_steps = getattr(settings.record, "counts_skipped_steps", False)
    if steps and (counts_steps or any(isinstance(stage, SelectingStage) for stage in added)):
        what = (
            "this optimizer counts skipped steps itself" if counts_steps else "a stage leaves variables out of updates"
        )
        problem, got = f"Keras accumulates gradients, and {what}", f"gradient_accumulation_steps={steps}"
        fix = f"Leave gradient_accumulation_steps out, and pass the stage Accumulate({steps})."
        raise ValueError(message(settings.owner, problem, "no gradient_accumulation_steps", got, fix))


def _make_combined_gradients(settings, inner):
    if not (settings.is_scaled and settings.combines):
        return None
    return CombinedGradients(
        settings.owner, settings.checks_combined, *([] if inner is None else [inner.joint_update_key])
    )


def _make_scaling_stages(settings):
    if not settings.is_scaled:
        return []
    scaling = GroupScaling if getattr(settings.manager, "is_for_groups", False) else LossScaling
    return [scaling(settings.manager)]


def _needs_check(settings, added):
    """Returns whether to check gradients: with loss scaling, float16, or stages that may make gradients unusable."""
    if settings.is_scaled:
        return settings.is_checked
    sends_float16 = settings.is_distributed and settings.wire_dtype == tf.float16
    changing = [stage for stage in added if isinstance(stage, ReducingStage) or changes_gradients(stage)]
    return (
        sends_float16
        or any(VERDICT in stage.needs for stage in added)
        or any(not stage.keeps_usable for stage in changing)
    )


def _make_checking_stages(settings, exchanging_stage, combined_gradients):
    """Returns the overflow check, and the stages that act on its decision."""
    # Without a loss scale, the results of `AllReduce` are checked. They are equal on all ranks, so no vote is needed.
    # With a loss scale, or another stage that exchanges, each rank checks gradients of its own, and all ranks vote.
    is_of_rank = settings.is_distributed and (settings.is_scaled or exchanging_stage is not None)
    is_local = is_of_rank and (exchanging_stage is None or REDUCED_GRADIENTS in exchanging_stage.gives)
    is_joint = settings.is_joint
    if is_joint is None:
        is_joint = is_of_rank or settings.is_sharded
    elif not is_joint and (is_of_rank or settings.is_sharded):
        problem, fix = "each rank would decide alone about gradients that ranks combine", "Leave is_joint out."
        raise ValueError(message(settings.owner, problem, "is_joint=True or None", "is_joint=False", fix))
    is_early = is_local and settings.is_tailing_optimization
    check = OverflowCheck(settings.name, is_joint, is_local, is_early, combined_gradients)
    if not settings.is_scaled:
        return [check, DroppedStepWarning(_dropped_step_warning(settings))]
    return [check, NarrowVariableGuard(), *([] if settings.record is None else [settings.record])]


def _dropped_step_warning(settings):
    """Returns the warning for the first step that is dropped, for optimizers without loss scaling."""
    if settings.is_distributed and settings.wire_dtype == tf.float16:
        return (
            f"{settings.owner}: a step was dropped, because a gradient is NaN or does not fit float16, in which it is "
            f"sent. Without a loss scale, every step like it is dropped. If it is not NaN, write wire='bfloat16', with "
            f"the range of float32, or wire='none'."
        )
    return (
        f"{settings.owner}: a step was dropped, because a gradient is NaN or infinite. Without a loss scale, every "
        f"step like it is dropped. Look for the cause in the loss or in the learning rate."
    )


def _check_communicating_stage(stage, settings, optimizer):
    name, owner = type(stage).__name__, settings.owner
    if not settings.is_distributed:
        problem, got = f"{name} exchanges values between ranks", "is_distributed=False"
        fix = f"Set is_distributed=True, or leave {name} out."
        raise ValueError(message(owner, problem, "is_distributed=True", got, fix))
    if settings.wire_dtype is not None:
        problem, got = f"{name} sends values of 32 bits", f"wire={settings.wire!r}"
        raise ValueError(message(owner, problem, "wire='none'", got, f"Leave wire or {name} out."))
    if REDUCED_GRADIENTS not in stage.gives and getattr(optimizer, "use_ema", False):
        problem = f"each rank would average its own weights over steps, before {name} combines the weights of all ranks"
        fix = f"Leave use_ema or {name} out."
        raise ValueError(message(owner, problem, "an optimizer without use_ema", "use_ema=True", fix))
    if settings.is_sharded and REDUCED_GRADIENTS not in stage.gives:
        problem, got = f"with {name} every rank updates with its own gradients", "is_weight_update_sharding=True"
        fix = f"Leave is_weight_update_sharding or {name} out."
        raise ValueError(message(owner, problem, "is_weight_update_sharding=False", got, fix))


def copy_stages(stages: Any, owner: str) -> list:
    """Copies the stages of a list; the copies have no variables.

    Raises:
      TypeError: `stages` is not a list of stages.
    """
    stages = check_list(owner, "stages", stages, "Write stages=[...].", expected="a list of npu_bridge.stages")
    for stage in stages:
        check_stage(stage, owner)
    return [copy.copy(stage) for stage in stages]
