"""`ResumableLoop`: a custom loop in TensorFlow 2 that ends after a whole update on request, and can resume."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base.arguments import check_count
from npu_bridge.base.errors import listed, message
from npu_bridge.base.memory_folders import keeps_state_in_memory
from npu_bridge.base.tf_internals.savers import is_restored
from npu_bridge.gradients.checkpoints.sync import batch_counters, reset_restarting_state, sync_if_needed
from npu_bridge.gradients.first_step.start_values import send_restored_state, variables_in_training
from npu_bridge.session.checkpoints import check_folder_name, save_unless_disk_is_full
from npu_bridge.session.damaged_checkpoints import check_newest_checkpoint
from npu_bridge.session.elastic.global_batches import count_earlier_steps
from npu_bridge.session.elastic.memory_checkpoints import CopyInterval, memory_checkpoints, take_memory_checkpoint
from npu_bridge.session.elastic.stop_request import WholeUpdates, stop_request_of_process

_OWNER = "ResumableLoop"
_KEPT = 2  # checkpoints


class ResumableLoop:
    """A custom training loop that saves model and optimizer; a later run resumes from the latest checkpoint.

    The constructor loads the latest checkpoint, if any, on rank 0, and sends the loaded values to all ranks. Rank 0
    saves. When a scheduler reclaims the machine (SIGTERM), or the job changes its size, all ranks complete their
    update, rank 0 saves, and the process ends with exit code 75. With several ranks this needs `npu-run`. In a job that
    `npu-run` restarts (`--min-np`, `--restarts`), rank 0 also keeps a copy in memory every N updates; N is chosen so
    that copies take 0.5 % of the time. In such a job a damaged checkpoint is passed over, with a line in the log.

    Args:
      folder: folder of the checkpoints.
      model: the model to train: a Keras model of any generation, or a `tf.Module`.
      optimizer: a Keras optimizer of any generation; `iterations` counts its updates.
      every_n_steps: updates between two checkpoints; None saves only at the end.
    Raises:
      TypeError: `every_n_steps` is not an integer.
      ValueError: `every_n_steps` is below 1; `folder` is a pattern; eager execution is off; the model has no weights
        yet; the latest checkpoint lacks trained weights of the model.
      DamagedCheckpointError: the latest checkpoint is damaged. In a job that the launcher restarts, raised only if no
        other checkpoint is intact.
    Ranks: collective; make it on every rank.
    Example:
      >>> loop = ResumableLoop("out", model, optimizer, every_n_steps=100)
      >>> data = iter(batches.dataset((x, y), "out"))
      >>> for _ in loop.until(1000):
      ...     train_step(*next(data))
    """

    def __init__(self, folder: str | os.PathLike, model: Any, optimizer: Any, every_n_steps: int | None = None):
        if every_n_steps is not None:
            every_n_steps = check_count(_OWNER, "every_n_steps", every_n_steps, "Leave it out to save at the end.")
        if not tf.executing_eagerly():
            fix = "Use MonitoredTrainingSession with StopHook() in a TF 1 graph."
            raise ValueError(
                message(_OWNER, "a loop in a TF 1 graph cannot be resumed", "eager execution", "a graph", fix)
            )
        if not getattr(model, "built", True):
            fix = "Begin the model with an Input, or call model.build(shape)."
            got = "a model without an input shape"
            raise ValueError(message(_OWNER, "the model has no weights yet", "a built model", got, fix))
        self._optimizer, self._every_n_steps = optimizer, every_n_steps
        self._folder, self._is_first = os.fspath(folder), collective.current().rank == 0
        check_folder_name(_OWNER, self._folder)
        if self._is_first:
            take_memory_checkpoint(self._folder)
            check_newest_checkpoint(self._folder, may_use_older=True)
        self._checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
        self._manager = tf.train.CheckpointManager(self._checkpoint, self._folder, _KEPT)
        self._request = stop_request_of_process()
        variables = variables_in_training(model, optimizer)
        self._size_bytes = sum(4 * int(np.prod(variable.shape)) for variable in variables)
        if self._is_first and self._manager.latest_checkpoint:
            self._checkpoint.restore(self._manager.latest_checkpoint)
            _check_model_restored(model, self._manager.latest_checkpoint)
            reset_restarting_state(optimizer)
        send_restored_state(model, optimizer)
        count_earlier_steps(optimizer)
        self._saved = self._copied = self._updates_made()
        self._is_saved = True  # on rank 0: the last save was made

    def until(self, steps: int) -> Iterator[int]:
        """Yields the number of updates made so far, before each batch. Saves and ends when this number is `steps`.

        A `break` or an error leaves the loop without saving.

        Ranks: collective; every rank makes the same number of iterations.
        """
        copies = memory_checkpoints(self._folder, only_of_job=True) if self._is_first else None
        interval = CopyInterval() if keeps_state_in_memory() else None
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._request.handle_requests(collective.current().size))
            if interval is not None:
                stack.callback(interval.close)
            updates = WholeUpdates()
            while True:
                # In the middle of an update, nothing is saved.
                is_within_update = updates.is_waiting(batch_counters(self._optimizer))
                if not is_within_update and self._save_and_check_end(steps):
                    break
                if interval is not None:
                    self._copy_if_due(interval, copies, is_within_update)
                self._request.begin_run()
                yield self._updates_made()
        if copies is not None:
            copies.remove_copies()
        if self._request.is_due:
            self._request.exit_after_save(self._updates_made())

    def _copy_if_due(self, interval, copies, is_within_update):
        """Writes a copy to memory if enough updates have been made since the last one."""
        made = self._updates_made()
        if made > self._copied and not is_within_update and interval.count_run_and_check_due():
            with interval.measured_copy():
                sync_if_needed(self._optimizer)
                if copies is not None:
                    copies.write(self._checkpoint.write, made, self._size_bytes)
        self._copied = made

    def _save_and_check_end(self, steps):
        """Saves a checkpoint if one is due, and returns whether the loop ends here."""
        made = self._updates_made()
        is_last = made >= steps or self._request.is_due
        is_time = is_last or bool(self._every_n_steps and made >= self._saved + self._every_n_steps)
        if is_time and made > self._saved:
            sync_if_needed(self._optimizer)
            self._saved, self._is_saved = made, not self._is_first
        if is_time and not self._is_saved:
            save, unfinished = functools.partial(self._manager.save, made), f"{self._folder}/ckpt-{made}_temp*"
            self._is_saved = bool(save()) if is_last else save_unless_disk_is_full(_OWNER, save, unfinished)
        return is_last

    def _updates_made(self):
        return int(self._optimizer.iterations)


def _check_model_restored(model, path):
    """Raises a ValueError that names trained weights that a checkpoint lacks; TensorFlow leaves them as they are."""
    lacking = [getattr(each, "path", each.name) for each in model.trainable_variables if not is_restored(each)]
    if lacking:
        problem, fix = f"{path} is a checkpoint of another model", "Use another folder, or the model that was saved."
        raise ValueError(message(_OWNER, problem, "this model's weights", f"nothing for {listed(lacking)}", fix))
