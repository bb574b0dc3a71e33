"""Averages the variables of a training whose ranks are apart between two updates."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from npu_bridge.gradients.explanation import pipelines_of
from npu_bridge.options.errors import message


def sync_all(optimizer: Any) -> Any:
    """Gives all ranks the mean of every variable that is trained with `PartialSync`.

    Run it on all ranks before rank 0 writes a checkpoint.

    Args:
      optimizer: an optimizer with that stage, or a pipeline; in a TF 1 graph after `minimize`.
    Returns:
      The op to run in a TF 1 graph or a `tf.function`; None when executed eagerly.
    Raises:
      TypeError: it has no stages.
      ValueError: `PartialSync` is not among them, or it is not known yet which variables are trained.
    Ranks: collective.
    """
    stages = [stage for pipeline in pipelines_of(optimizer) for stage in pipeline.stages]
    found = [stage for stage in stages if hasattr(stage, "sync_all")]
    if not found:
        names = ", ".join(type(stage).__name__ for stage in stages)
        problem, mend = "ranks do not drift apart with these stages", "Leave the call out."
        raise ValueError(message("sync_all", problem, "an optimizer with PartialSync", names, mend))
    with tf.name_scope("sync_all"):
        return found[0].sync_all()
