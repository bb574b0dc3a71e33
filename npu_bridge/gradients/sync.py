"""Brings ranks together before rank 0 saves: values that each rank keeps, and variables that differ between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from npu_bridge import collective
from npu_bridge.base.arguments import check_count
from npu_bridge.base.errors import message
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.gradients.collections import pipelines_in
from npu_bridge.gradients.explanation import list_pipelines
from npu_bridge.gradients.stage import begun_anew
from npu_bridge.graph.variables import global_step_of

_AT_THE_END, _NEVER = 0, -1  # instead of steps between checkpoints


def sync_all(optimizer: Any) -> Any:
    """Makes what rank 0 would write into a checkpoint now that of all ranks.

    Run it on all ranks before rank 0 writes one. What stages keep for each rank alone, as the sums of `Accumulate` and
    what `TopK` and `Threshold` did not send, is gathered on rank 0, until the next step; when training goes on from
    such a checkpoint, each rank takes its own. So are weights and slots with `PartialSync`, where all ranks have the
    mean of every trained variable until the next step gives each its own back, and slots with `Adasum` of weights.

    Args:
      optimizer: an optimizer with that stage, or a pipeline; in a TF 1 graph after `minimize`.
    Returns:
      The op to run in a TF 1 graph or a `tf.function`; None when executed eagerly.
    Raises:
      TypeError: it has no stages.
      ValueError: no stage needs it, or it is not known yet which variables are trained.
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
    """As `sync_all`, executed eagerly, for any optimizer: does nothing for one that is the same on all ranks.

    Ranks: collective.
    """
    try:
        pipelines = list_pipelines(optimizer)
    except TypeError:
        return  # it has no stages
    if collective.current().size > 1 and differ_between_ranks(pipelines):
        _sync(pipelines)


def batches_waiting(optimizer: Any) -> list:
    """Variables that count the batches which an optimizer has added up and not yet applied; none for most.

    Args:
      optimizer: as of `sync_all`; one without stages has none.
    """
    try:
        stages = [stage for pipeline in list_pipelines(optimizer) for stage in pipeline.stages]
    except TypeError:
        return []
    return [stage.batches_so_far for stage in stages if stage.spans_batches and stage.batches_so_far is not None]


def begin_anew(optimizer: Any) -> None:
    """Sets to zero what no training goes on with that was restored; executed eagerly, for any optimizer."""
    try:
        stages = [stage for pipeline in list_pipelines(optimizer) for stage in pipeline.stages]
    except TypeError:
        return  # it has no stages
    for variable in begun_anew(stages):
        variable.assign(tf.zeros_like(variable))


def differ_between_ranks(pipelines: Sequence) -> bool:
    """Returns True when stages keep values that differ between ranks, so `sync_all` must precede a checkpoint."""
    return any(pipeline.has_rank_values or _synchronising(pipeline) for pipeline in pipelines)


def _sync(pipelines):
    with tf.name_scope("sync_all"):
        gathered = [pipeline.gather_rank_values() for pipeline in pipelines if pipeline.has_rank_values]
        # What is gathered are the weights before they become the mean.
        with tf.control_dependencies([] if tf.executing_eagerly() else gathered):
            averaged = [stage.sync_all() for pipeline in pipelines for stage in _synchronising(pipeline)]
    return None if tf.executing_eagerly() else tf.group(*gathered, *averaged)


def _synchronising(pipeline):
    return [stage for stage in pipeline.stages if hasattr(stage, "sync_all")]


class SyncBeforeSavingHook(tf.compat.v1.train.SessionRunHook):
    """Runs `sync_all` when a checkpoint of rank 0 is due, for the optimizers of the session's graph.

    It counts as a `tf.estimator.CheckpointSaverHook` with the same `save_steps`, and comes before that one in the list
    of hooks. `NPUEstimator` has both by itself, unless it is given a saver. Where no stage needs `sync_all`, and on one
    rank, the hook does nothing.

    Args:
      save_steps: global steps between checkpoints; None for those that follow the clock, of which only the last one,
        at the end of training, is prepared for: ranks do not have the same clock.
      is_saving: False where no checkpoint is written, and nothing is to be done.
    Raises:
      TypeError: `save_steps` is not an integer.
      ValueError: it is below 1.
    Ranks: collective; give it to every rank. What rank 0 is given counts.
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
        # A saver saves what a session starts with, in which ranks are alike.
        self._synced_at, self._interval = session.run([self._global_step, self._interval_of_rank_0])
        if self._interval == _NEVER:
            self._sync = None

    def before_run(self, run_context):
        self._are_together = False
        return None if self._sync is None else tf.compat.v1.train.SessionRunArgs(self._global_step)

    def after_run(self, run_context, run_values):
        # The step is read beside its update, so what was read may be one behind.
        if self._sync is None or not self._is_due(run_values.results + 1):
            return
        step = run_context.session.run(self._global_step)
        if self._is_due(step):
            self._run(run_context.session, step)

    def end(self, session):
        if self._sync is None:
            return
        step = session.run(self._global_step)
        # A run that was begun, and found no more data, has given weights back.
        if step != self._synced_at or any(pipeline.has_given_back(session) for pipeline in self._pipelines):
            self._run(session, step)

    def bring_together(self, session: Any) -> None:
        """Has `sync_all` run once more after a run, for a copy of the variables that is no checkpoint of this hook's.

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
