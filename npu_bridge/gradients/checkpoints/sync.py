"""Prepares the ranks for a checkpoint: gathers values that differ between ranks, and averages weights that differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from npu_bridge import collective
from npu_bridge.base.arguments import check_count
from npu_bridge.base.errors import message
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.tf_internals import keras3
from npu_bridge.gradients.collections import pipelines_in
from npu_bridge.gradients.explanation import list_pipelines
from npu_bridge.gradients.graph_mode import group_in_graph
from npu_bridge.gradients.stage import SummingStage, SynchronisingStage, variables_restarting_at_zero
from npu_bridge.gradients.stages.skip_record import SkipRecord
from npu_bridge.graph.variables import global_step_of

_AT_THE_END, _NEVER = 0, -1  # instead of steps between checkpoints


def sync_all(optimizer: Any) -> Any:
    """Gathers values that differ between ranks on rank 0, for its next checkpoint.

    Run this on all ranks before rank 0 writes a checkpoint. Rank 0 holds the values of all ranks until the next step:
    sums of `Accumulate`, values that `TopK` and `Threshold` did not send, weights and slots with `PartialSync`, and
    slots with `Adasum(on="weights")`. When training resumes from this checkpoint, each rank restores its own values.
    With `PartialSync`, `sync_all` also sets the trained variables of all ranks to their mean, until the next step
    restores the values of each rank.

    Args:
      optimizer: an optimizer with such a stage, or a pipeline; in a TF 1 graph after `minimize`.
    Returns:
      The op to run in a TF 1 graph or a `tf.function`; None in eager execution.
    Raises:
      TypeError: `optimizer` has no stages.
      ValueError: no stage needs the call, or the trained variables are not known yet.
    Ranks: collective.
    """
    pipelines = list_pipelines(optimizer)
    if not do_values_differ_between_ranks(pipelines):
        names = ", ".join(type(stage).__name__ for pipeline in pipelines for stage in pipeline.stages) or "no stage"
        problem, fix = "with these stages no values differ between ranks", "Leave the call out."
        expected = "an optimizer with PartialSync, Accumulate, TopK, Threshold or Adasum on weights"
        raise ValueError(message("sync_all", problem, expected, names, fix))
    return _sync_pipelines(pipelines)


def sync_if_needed(optimizer: Any) -> None:
    """Runs `sync_all` eagerly if the optimizer needs it; accepts any optimizer.

    Ranks: collective.
    """
    pipelines = pipelines_of(optimizer)
    if collective.current().size > 1 and do_values_differ_between_ranks(pipelines):
        _sync_pipelines(pipelines)


def pipelines_of(optimizer: Any) -> list:
    """Returns the pipelines of any optimizer; [] for an optimizer without stages."""
    try:
        return list_pipelines(optimizer)
    except TypeError:
        return []


def batch_counters(optimizer: Any) -> list:
    """Returns the counts of batches accumulated for the next update: variables of stages, and a number of Keras 3.

    The list is empty if no batches are accumulated.

    Args:
      optimizer: any optimizer, or a pipeline.
    """
    stages = [stage for pipeline in pipelines_of(optimizer) for stage in pipeline.stages_of_type(SummingStage)]
    of_keras = keras3.batches_in_window(getattr(optimizer, "inner_optimizer", optimizer))
    return [*(counter for stage in stages for counter in stage.batch_counters), *of_keras]


def batches_per_update(optimizer: Any) -> int:
    """Returns the number of batches of an update of any optimizer, or of a pipeline.

    Above 1 with `Accumulate`, and with `gradient_accumulation_steps` of Keras 3.
    """
    pipelines = pipelines_of(optimizer)
    return _batches_of_keras(optimizer) * math.prod(
        stage.batches for pipeline in pipelines for stage in pipeline.stages_of_type(SummingStage)
    )


def _batches_of_keras(optimizer):
    return getattr(getattr(optimizer, "inner_optimizer", optimizer), "gradient_accumulation_steps", None) or 1


def count_batches(optimizer: Any) -> int:
    """Returns the number of batches on which any optimizer was trained, as its own counters say; works only eagerly."""
    records = [each for pipeline in pipelines_of(optimizer) for each in pipeline.stages_of_type(SkipRecord)]
    skipped = [int(each.skipped_steps) for each in records if not each.counts_skipped_steps]
    of_keras = _batches_of_keras(optimizer)  # of which one is skipped, not the whole update
    tried = int(optimizer.iterations) * of_keras + max(skipped, default=0)
    batches = batches_per_update(optimizer) // of_keras
    return tried * batches + max(map(int, batch_counters(optimizer)), default=0)


def batches_per_update_in(graph: tf.Graph) -> int:
    """Returns the largest number of batches of an update in a TF 1 graph."""
    return max(map(batches_per_update, pipelines_in(graph)), default=1)


def reset_restarting_state(optimizer: Any) -> None:
    """Zeroes the variables of an optimizer's stages that start at zero when training resumes; works only eagerly.

    Does nothing for an optimizer without stages.
    """
    stages = [stage for pipeline in pipelines_of(optimizer) for stage in pipeline.stages]
    for variable in variables_restarting_at_zero(stages):
        variable.assign(tf.zeros_like(variable))


def do_values_differ_between_ranks(pipelines: Sequence) -> bool:
    """Returns whether values of stages differ between ranks, so that a checkpoint needs `sync_all` before it."""
    return any(pipeline.saved.rank_values or pipeline.stages_of_type(SynchronisingStage) for pipeline in pipelines)


def _sync_pipelines(pipelines):
    with tf.name_scope("sync_all"):
        gathered = [pipeline.gather_own_values() for pipeline in pipelines if pipeline.saved.rank_values]
        # The weights are gathered before they are averaged.
        with tf.control_dependencies([] if tf.executing_eagerly() else gathered):
            averaged = [
                stage.sync_all() for pipeline in pipelines for stage in pipeline.stages_of_type(SynchronisingStage)
            ]
    return group_in_graph(*gathered, *averaged)


class SyncBeforeSavingHook(tf.compat.v1.train.SessionRunHook):
    """Runs `sync_all` when a checkpoint of rank 0 is due, for the optimizers of the session's graph.

    Put this hook before the `tf.estimator.CheckpointSaverHook` in the list of hooks, with the same `save_steps`.
    `NPUEstimator` adds both hooks automatically, unless it is given a saver. The hook does nothing with one rank, or if
    no stage needs `sync_all`.

    Args:
      save_steps: global steps between checkpoints; None for checkpoints by time. With None, only the checkpoint at the
        end of training is prepared, because the clocks of ranks differ.
      is_saving: False if no checkpoint is written; the hook then does nothing.
    Raises:
      TypeError: `save_steps` is not an integer.
      ValueError: `save_steps` is below 1.
    Ranks: collective; give this hook to every rank. The arguments on rank 0 count.
    """

    def __init__(self, save_steps: int | None = None, is_saving: bool = True):
        if save_steps is not None:
            fix = "Pass the save_steps of the CheckpointSaverHook."
            save_steps = check_count("SyncBeforeSavingHook", "save_steps", save_steps, fix)
        self._interval = (save_steps or _AT_THE_END) if is_saving else _NEVER
        self._sync = None
        self._is_synced = False

    def begin(self):
        graph, ranks = tf.compat.v1.get_default_graph(), collective.current()
        self._pipelines = pipelines = pipelines_in(graph)
        self._global_step, self._sync = global_step_of(graph), None
        if ranks.size > 1 and self._global_step is not None and do_values_differ_between_ranks(pipelines):
            self._sync = _sync_pipelines(pipelines)
            # Other ranks may read no checkpoint, and receive the restored step from a later hook.
            numbers = tf.stack([tf.cast(self._global_step, tf.int64), self._interval])
            self._numbers_of_rank_0 = ranks.broadcast(numbers, 0, "sync_before_saving")

    def after_create_session(self, session, coord):
        if self._sync is None:
            return
        # A saver writes the first checkpoint at once; at that time values are equal on all ranks.
        self._synced_at, self._interval = session.run(self._numbers_of_rank_0)
        if self._interval == _NEVER:
            self._sync = None

    def before_run(self, run_context):
        self._is_synced = False
        return None if self._sync is None else tf.compat.v1.train.SessionRunArgs(self._global_step)

    def after_run(self, run_context, run_values):
        # The step is read in parallel with its update, so the value can be one step behind.
        if self._sync is None or not self._is_due(run_values.results + 1):
            return
        step = run_context.session.run(self._global_step)
        if self._is_due(step):
            self._sync_at_step(run_context.session, step)

    def end(self, session):
        if self._sync is None:
            return
        step = session.run(self._global_step)
        # A run that started but found no more data has restored the weights of each rank.
        has_restored = any(pipeline.saved.has_restored_weights(session) for pipeline in self._pipelines)
        if step != self._synced_at or has_restored:
            self._sync_at_step(session, step)

    def sync_before_copy(self, session: Any) -> None:
        """Runs `sync_all` before state is copied without a saver hook, unless it has run since the last step.

        Ranks: collective; call it between two session runs.
        """
        if self._sync is not None and not self._is_synced:
            self._is_synced = True
            session.run(self._sync)

    def _is_due(self, step):
        return self._interval != _AT_THE_END and step >= self._synced_at + self._interval

    def _sync_at_step(self, session, step):
        self.sync_before_copy(session)
        self._synced_at = step
