"""Chooses the stages of an optimizer's pipeline from the optimizer's options."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from npu_bridge.base.arguments import check_list
from npu_bridge.base.errors import message
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.gradients.combined import CombinedGradients
from npu_bridge.gradients.inner import InnerOptimizer, adapt
from npu_bridge.gradients.order import check_stage
from npu_bridge.gradients.pipeline import Pipeline
from npu_bridge.gradients.sharding import SharedUpdate
from npu_bridge.gradients.stage import Stage
from npu_bridge.gradients.stages.all_reduce import AllReduce, OptimizerSplit
from npu_bridge.gradients.stages.group_scaling import GroupScaling
from npu_bridge.gradients.stages.loss_scaling import LossScaling
from npu_bridge.gradients.stages.overflow import DropWarning, NarrowVariableGuard, OverflowCheck


def build_pipeline(
    name: str,
    manager: Any = None,
    is_checked: bool = True,
    is_distributed: bool = False,
    is_joint: bool | None = None,
    is_tailed: bool = False,
    wire_dtype: tf.DType | None = None,
    is_sharded: bool = False,
    stages: Sequence[Stage] = (),
    record: Stage | None = None,
    first_parameters: tuple | None = None,
    combines: bool = False,
    checks_combined: bool = False,
    inner: Any = None,
    owner: str = "Pipeline",
) -> Pipeline:
    """Builds the pipeline of one optimizer.

    Args:
      name: name of the optimizer, and prefix of the names of its collectives.
      manager: the loss-scale manager, or a list of managers, one for each loss; None for no loss scaling.
      is_checked: skip steps whose gradients overflow; used with a manager.
      is_distributed: average gradients over the ranks.
      is_joint: skip a step on all ranks if gradients overflow on one. None means True if the pipeline exchanges
        gradients that can overflow, or if the update is sharded.
      is_tailed: decide whether to skip a step before the last fragment is all-reduced; used with a manager and several
        ranks.
      wire_dtype: the 16-bit dtype to which gradients are rounded before the all-reduce, or None.
      is_sharded: whether the weight update is sharded over the ranks.
      stages: stages that the user adds. They are copied, so one list can serve several optimizers.
      record: a stage that records skipped steps; used with a manager.
      first_parameters: positions of the parameters at which all-reduce fragments begin; None for the split of the
        process.
      combines: join gradients into flat tensors; used with a manager.
      checks_combined: compare the flat tensors with the single gradients in every step.
      inner: the optimizer that updates, of any family.
      owner: name of the optimizer's class, for messages.
    Raises:
      TypeError: `stages` is not a list of stages, or `inner` is not an optimizer.
      ValueError: the stages cannot be ordered.
    """
    added = copy_stages(stages, owner)
    if inner is not None and not isinstance(inner, InnerOptimizer):
        inner = adapt(inner, owner, is_updating=False)
    combined, made = None, []
    if manager is not None:
        if combines:
            combined = CombinedGradients(owner, checks_combined, *([] if inner is None else [inner.combine_key]))
        scaling = GroupScaling if getattr(manager, "is_for_groups", False) else LossScaling
        made.append(scaling(manager, combined))
    exchanging = next((stage for stage in added if stage.communicates), None)
    if exchanging is not None:
        _check_communicating_stage(exchanging, is_distributed, wire_dtype, is_sharded, owner)
        exchanging.transfer_name = name
    elif is_distributed:
        made.append(AllReduce(name, wire_dtype))
    if is_checked if manager is not None else _can_harm_without_scaling(added, is_distributed, wire_dtype):
        # The gradients that AllReduce returns are equal on all ranks, and so are decisions about them.
        is_of_rank = is_distributed and (manager is not None or exchanging is not None)
        is_local = is_of_rank and (exchanging is None or "reduced gradients" in exchanging.gives)
        if is_joint is None:
            is_joint = is_of_rank or is_sharded
        made.append(OverflowCheck(name, is_joint, is_local, decides_early=is_local and is_tailed, combined=combined))
        if manager is None:
            made.append(DropWarning(_drop_warning(wire_dtype, owner)))
        else:
            made += [NarrowVariableGuard(), *([] if record is None else [record])]
    made += [SharedUpdate()] if is_sharded else []
    for stage in (*made, *added):
        if isinstance(stage, AllReduce):
            stage.split = OptimizerSplit(first_parameters)
    return Pipeline([*made, *added], inner, owner)


def _can_harm_without_scaling(stages, is_distributed, wire_dtype):
    """Returns whether an overflow can do harm without loss scaling: in 16 bits, or in values that a stage keeps."""
    return is_distributed and wire_dtype == tf.float16 or any("a verdict" in stage.needs for stage in stages)


def _drop_warning(wire_dtype, owner):
    """Returns the warning for the first step that is dropped, for optimizers without loss scaling."""
    if wire_dtype == tf.float16:
        return (
            f"{owner}: a step was dropped, because a gradient does not fit float16, in which it is sent. Without a "
            f"loss scale, every step like it is dropped. Write wire='bfloat16', which has the range of float32, or "
            f"wire='none'."
        )
    return (
        f"{owner}: a step was dropped, because a gradient is NaN or infinite. Without a loss scale, every step like it "
        f"is dropped. Look for the cause in the loss or in the learning rate."
    )


def _check_communicating_stage(stage, is_distributed, wire_dtype, is_sharded, owner):
    name = type(stage).__name__
    if not is_distributed:
        problem, got = f"{name} exchanges values between ranks", "is_distributed=False"
        fix = f"Set is_distributed=True, or leave {name} out."
        raise ValueError(message(owner, problem, "is_distributed=True", got, fix))
    if wire_dtype is not None:
        problem, got = f"{name} sends values of 32 bits", f"wire={wire_dtype.name!r}"
        raise ValueError(message(owner, problem, "wire='none'", got, f"Leave wire or {name} out."))
    if is_sharded and "reduced gradients" not in stage.gives:
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
