"""Lists the collectives that stages are about to run, for a comparison between ranks before the first one."""

from __future__ import annotations

from collections.abc import Sequence

from npu_bridge.base.own_tensorflow import tf
from npu_bridge.collective.checks import agreement
from npu_bridge.gradients.stage import DecidingStage, ExchangingStage, Stage


def plan_collectives(
    stages: Sequence[Stage], grads_and_vars: Sequence, has_numbered_names: bool
) -> agreement.AllReducePlan:
    """Lists the collectives of `stages` for these gradients; ranks compare the lists before the first collective."""
    plan = agreement.AllReducePlan(has_numbered_names=has_numbered_names)
    for stage in stages:
        if isinstance(stage, (ExchangingStage, DecidingStage)):
            plan.owner = stage.transfer_name or plan.owner
        for name, value in stage.agreed_settings(grads_and_vars).items():
            others = sum(key.partition(" ")[0] == name for key in plan.settings)  # of other stages of this class
            plan.settings[f"{name} {others + 1}" if others else name] = value
        if isinstance(stage, ExchangingStage):
            plan.gradients = [_describe_gradient(grad, variable) for grad, variable in grads_and_vars]
            plan.fragments = stage.fragments(grads_and_vars)
    return plan


def _describe_gradient(grad, variable):
    """Returns the properties of one gradient that must be equal on all ranks."""
    shape = str(tuple(variable.shape.as_list())) if variable.shape.rank is not None else "unknown"
    if grad is None:
        return agreement.PlannedGradient(variable.name, shape, "no gradient", "")
    kind = "a sparse gradient" if isinstance(grad, tf.IndexedSlices) else "a dense gradient"
    return agreement.PlannedGradient(variable.name, shape, kind, grad.dtype.name)
