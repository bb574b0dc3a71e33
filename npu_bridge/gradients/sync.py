"""Prepares the ranks for a checkpoint: gathers the values that each rank keeps, and averages weights that differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from npu_bridge import collective
from npu_bridge.base.arguments import check_count
from npu_bridge.base.errors import message
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.gradients.collections import pipelines_in
from npu_bridge.gradients.explanation import list_pipelines
from npu_bridge.gradients.stage import variables_restarting_at_zero
from npu_bridge.graph.variables import global_step_of

_AT_THE_END, _NEVER = 0, -1  # instead of steps between checkpoints


def sync_all(optimizer: Any) -> Any:
    """Collects the values of all ranks on rank 0, for its next checkpoint.

    Run it on all ranks before rank 0 writes one. Values that stages keep for each rank alone, such as the sums of
    `Accumulate` and the values that `TopK` and `Threshold` did not send, are gathered on rank 0 until the next step.
    When training resumes from such a checkpoint, each rank takes its own. So are weights and slots with `PartialSync`,
    where all ranks hold the mean of every trained variable until the next step restores each rank's own, and slots with
    `Adasum` of weights.

    Args:
      optimizer: an optimizer with such a stage, or a pipeline; in a TF 1 graph after `minimize`.
    Returns:
      The op to run in a TF 1 graph or a `tf.function`; None when executed eagerly.
    Raises:
      TypeError: `optimizer` has no stages.
      ValueError: no stage needs the call, or the trained variables are not known yet.
    Ranks: collective.
    """
    pipelines = list_pipelines(optimizer)
    if not differ_between_ranks(pipelines):
        names = ", ".join(type(stage).__name__ for pipeline in pipelines for stage in pipeline.stages)
        problem, fix = "ranks are alike with these stages", "Leave the call out."
        expected = "an optimizer with PartialSync, Accumulate, TopK, Threshold or Adasum on weights"
        raise ValueError(message("sync_all", problem, expected, names, fix))
    return _sync(pipelines)


def sync_if_needed(optimizer: Any) -> None:
    """Runs `sync_all` eagerly where an optimizer needs it; accepts any optimizer.

    Ranks: collective.
    """
    try:
        pipelines = list_pipelines(optimizer)
    except TypeError:
        return  # it has no stages
    if collective.current().size > 1 and differ_between_ranks(pipelines):
        _sync(pipelines)


def batches_waiting(optimizer: Any) -> list:
    """Returns the variables that count the batches added up and not yet applied; for most optimizers none.

    Args:
      optimizer: as for `sync_all`, or one without stages.
    """
    try:
        stages = [stage for pipeline in list_pipelines(optimizer) for stage in pipeline.stages]
    except TypeError:
        return []
    return [stage.batches_so_far for stage in stages if stage.spans_batches and stage.batches_so_far is not None]


def begin_anew(optimizer: Any) -> None:
    """Sets restored state that no training resumes to zero; executed eagerly, for any optimizer."""
    try:
        stages = [stage for pipeline in list_pipelines(optimizer) for stage in pipeline.stages]
    except TypeError:
        return  # it has no stages
    for variable in variables_restarting_at_zero(stages):
        variable.assign(tf.zeros_like(variable))


def differ_between_ranks(pipelines: Sequence) -> bool:
    """Returns True when stages keep values that differ between ranks, so `sync_all` must precede a checkpoint."""
    return any(pipeline.has_rank_values or _synchronising(pipeline) for pipeline in pipelines)


def _sync(pipelines):
    with tf.name_scope("sync_all"):
        gathered = [pipeline.gather_rank_values() for pipeline in pipelines if pipeline.has_rank_values]
        # The weights are gathered before they become the mean.
        with tf.control_dependencies([] if tf.executing_eagerly() else gathered):
            averaged = [stage.sync_all() for pipeline in pipelines for stage in _synchronising(pipeline)]
    return None if tf.executing_eagerly() else tf.group(*gathered, *averaged)


def _synchronising(pipeline):
    return [stage for stage in pipeline.stages if hasattr(stage, "sync_all")]


class SyncBeforeSavingHook(tf.compat.v1.train.SessionRunHook):
    """Runs `sync_all` when a checkpoint of rank 0 is due, for the optimizers of the session's graph.

    It counts as a `tf.estimator.CheckpointSaverHook` with the same `save_steps` does, and comes before that hook in the
    list. `NPUEstimator` adds both by itself, unless it is given a saver. The hook does nothing on one rank, or where no
    stage needs `sync_all`.

    Args:
      save_steps: global steps between checkpoints; None for checkpoints by time. Of those only the last one, at the end
        of training, is prepared for, because clocks of ranks differ.
      is_saving: False where no checkpoint is written; the hook then does nothing.
    Raises:
      TypeError: `save_steps` is not an integer.
      ValueError: it is below 1.
    Ranks: collective; give it to every rank. Rank 0's arguments count.
    """

    def __init__(self, save_steps: int | None = None, is_saving: bool = True):
        if save_steps is not None:
            fix = "Give it the save_steps of the saver."
            save_steps = check_count("SyncBeforeSavingHook", "save_steps", save_steps, fix)
        self._interval = (save_steps or _AT_THE_END) if is_saving else _NEVER
        self._sync = None
        self._are_together = False

    def begin(self):
        graph, ranks = tf.compat.v1.get_default_graph(), collective.current()
        self._pipelines = pipelines = pipelines_in(graph)
        self._global_step = global_step_of(graph)
        if ranks.size > 1 and self._global_step is not None and differ_between_ranks(pipelines):
            self._sync = _sync(pipelines)
            self._interval_of_rank_0 = ranks.broadcast(tf.constant(self._interval), 0, "sync_before_saving")

    def after_create_session(self, session, coord):
        if self._sync is None:
            return
        # Values that a session starts with, which a saver writes at once, are alike on all ranks.
        self._synced_at, self._interval = session.run([self._global_step, self._interval_of_rank_0])
        if self._interval == _NEVER:
            self._sync = None

    def before_run(self, run_context):
        self._are_together = False
        return None if self._sync is None else tf.compat.v1.train.SessionRunArgs(self._global_step)

    def after_run(self, run_context, run_values):
        # The step is read beside its update, so the value can be one behind.
        if self._sync is None or not self._is_due(run_values.results + 1):
            return
        step = run_context.session.run(self._global_step)
        if self._is_due(step):
            self._run(run_context.session, step)

    def end(self, session):
        if self._sync is None:
            return
        step = session.run(self._global_step)
        # A run that started, and found no more data, has restored each rank's own weights.
        if step != self._synced_at or any(pipeline.has_restored_own_weights(session) for pipeline in self._pipelines):
            self._run(session, step)

    def bring_together(self, session: Any) -> None:
        """Runs `sync_all` again after a run, for a copy of the variables other than this hook's checkpoints.

        Ranks: collective; between two runs.
        """
        if self._sync is not None and not self._are_together:
            self._are_together = True
            session.run(self._sync)

    def _is_due(self, step):
        return self._interval != _AT_THE_END and step >= self._synced_at + self._interval

    def _run(self, session, step):
        self.bring_together(session)
        self._synced_at = step
