"""`MemoryCheckpointHook`: copies a training's state to memory when `memory_checkpoints.py` says that it is due."""

from __future__ import annotations

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base.errors import message
from npu_bridge.base.memory_folders import keeps_state_in_memory
from npu_bridge.gradients.checkpoints import remote_slots
from npu_bridge.gradients.checkpoints.sync import SyncBeforeSavingHook, do_values_differ_between_ranks
from npu_bridge.gradients.collections import pipelines_in
from npu_bridge.graph.run import run_of_context
from npu_bridge.graph.variables import global_step_of
from npu_bridge.session.elastic.background_saves import size_of_variables
from npu_bridge.session.elastic.memory_checkpoints import CopyInterval, memory_checkpoints, take_memory_checkpoint


class MemoryCheckpointHook(tf.estimator.SessionRunHook):
    """A hook that keeps a copy of all variables in memory, so that a job that loses a rank or host repeats few steps.

    It works in a job that `npu-run` restarts (`--min-np`, `--hosts-from` or `--restarts`); in other jobs it does
    nothing. Rank 0 and the first rank of each other host write their variables to memory every N runs. N is chosen from
    the measured cost of a copy, so that copies take 0.5 % of the time. If ranks keep their own state (`TopK`, sharded
    slots), only the host of rank 0 has copies. A restarted job resumes from a copy if the copy is newer than the
    checkpoints on the disk. Copies are removed at the end of the training: put this hook after the saver, so that the
    last checkpoint is on the disk by then.

    Args:
      checkpoint_dir: the folder of the checkpoints on the disk.
      sync: the hook that brings ranks together before they save, if there is one; it must come before this hook.
      scaffold: the `Scaffold` whose saver defines the saved variables; by default the saver of the graph.
    Raises:
      ValueError: in `begin`, if ranks keep their own state and `sync` is None.
    Ranks: collective; give it to every rank.
    Example:
      >>> hooks = [StopHook(), MemoryCheckpointHook("out")]
      >>> with MonitoredTrainingSession(checkpoint_dir="out", hooks=hooks) as session:
    """

    def __init__(
        self,
        checkpoint_dir: str,
        sync: SyncBeforeSavingHook | None = None,
        scaffold: tf.compat.v1.train.Scaffold | None = None,
    ):
        self._checkpoint_dir, self._sync, self._scaffold = checkpoint_dir, sync, scaffold
        self._interval: CopyInterval | None = None
        self._copies = None

    @property
    def every_n_runs(self) -> int | None:
        """Present number of runs between two copies; None if no copies are made."""
        return self._interval and self._interval.runs

    def begin(self):
        self._interval = self._copies = None
        if not keeps_state_in_memory():
            return
        graph, ranks = tf.compat.v1.get_default_graph(), collective.current()
        take_memory_checkpoint(self._checkpoint_dir)
        is_apart = ranks.size > 1 and do_values_differ_between_ranks(pipelines_in(graph))
        if is_apart and self._sync is None:
            problem, expected = "ranks differ in their state", "sync=SyncBeforeSavingHook(...) on every rank"
            fix = "Put the SyncBeforeSavingHook before this hook, too."
            raise ValueError(message("MemoryCheckpointHook", problem, expected, "sync=None", fix))
        is_alike = not is_apart and remote_slots.find_remote_slots(graph) is None
        if ranks.rank == 0 or (ranks.local_rank == 0 and is_alike):
            self._copies = memory_checkpoints(self._checkpoint_dir, only_of_job=True)
        self._size_bytes = size_of_variables(graph)
        self._interval = CopyInterval()

    def after_create_session(self, session, coord):
        if self._interval is not None:
            self._interval.begin()

    def after_run(self, run_context, run_values):
        is_training = self._interval is not None and run_of_context(run_context).trains
        if is_training and self._interval.count_run_and_check_due():
            with self._interval.measured_copy():
                self._copy_to_memory(run_context.session)

    def end(self, session):
        if self._copies is not None:
            self._copies.remove_copies()
        if self._interval is not None:
            self._interval.close()

    def _copy_to_memory(self, session):
        if self._sync is not None:
            self._sync.sync_before_copy(session)
        if self._copies is not None:
            of_graph = session.graph.get_collection(tf.compat.v1.GraphKeys.SAVERS)
            saver = self._scaffold.saver if self._scaffold else next(iter(of_graph), None)
            step = global_step_of(session.graph)
            if saver is not None and step is not None:
                names = saver.saver_def
                self._copies.write(
                    lambda path: session.run(names.save_tensor_name, {names.filename_tensor_name: path}),
                    int(session.run(step)),
                    self._size_bytes,
                )
