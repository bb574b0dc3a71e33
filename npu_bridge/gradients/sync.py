"""Prepares a checkpoint of rank 0 where ranks keep something for themselves, or are apart between two updates."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from npu_bridge.gradients.explanation import pipelines_of
from npu_bridge.options.errors import message


def sync_all(optimizer: Any) -> Any:
    """Makes what rank 0 would write into a checkpoint now that of all ranks.

    Run it on all ranks before rank 0 writes one. With `PartialSync` all ranks get the mean of every trained variable.
    What stages keep for each rank alone, as the sums of `Accumulate` and what `TopK` and `Threshold` did not send, is
    gathered on rank 0, until the next step; when training goes on from such a checkpoint, each rank takes its own.

    Args:
      optimizer: an optimizer with that stage, or a pipeline; in a TF 1 graph after `minimize`.
    Returns:
      The op to run in a TF 1 graph or a `tf.function`; None when executed eagerly.
    Raises:
      TypeError: it has no stages.
      ValueError: no stage needs it, or it is not known yet which variables are trained.
    Ranks: collective.
    """
    pipelines = pipelines_of(optimizer)
    stages = [stage for pipeline in pipelines for stage in pipeline.stages]
    synchronising = [stage for stage in stages if hasattr(stage, "sync_all")]
    keeping = [pipeline for pipeline in pipelines if pipeline.has_rank_values]
    if not synchronising and not keeping:
        names = ", ".join(type(stage).__name__ for stage in stages)
        problem, mend = "ranks are alike with these stages", "Leave the call out."
        expected = "an optimizer with PartialSync, Accumulate, TopK or Threshold"
        raise ValueError(message("sync_all", problem, expected, names, mend))
    with tf.name_scope("sync_all"):
        ops = [stage.sync_all() for stage in synchronising]
        ops += [pipeline.gather_rank_values() for pipeline in keeping]
    return None if tf.executing_eagerly() else tf.group(*ops)
