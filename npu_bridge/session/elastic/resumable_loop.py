"""`ResumableLoop`: a loop of one's own in TensorFlow 2 that ends after a whole update when asked to, and goes on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base.arguments import check_count
from npu_bridge.base.errors import message
from npu_bridge.gradients.start_values import variables_in_training
from npu_bridge.gradients.sync import batches_waiting, begin_anew, sync_if_needed
from npu_bridge.session.elastic.stop_request import of_this_process

__all__ = ["ResumableLoop"]

_OWNER = "ResumableLoop"
_KEPT = 2  # checkpoints


class ResumableLoop:
    """A training loop of one's own that saves model and optimizer; a later run goes on from there.

    When it is made, rank 0 loads the latest checkpoint, if there is one, and all ranks get its values. Rank 0 saves.
    When a scheduler wants the machine back (SIGTERM), or the job changes its size, all ranks complete the update they
    are in, rank 0 saves, and the process ends with exit code 75. With several ranks that needs `npu-run`.

    Args:
      folder: of the checkpoints.
      model: what is trained: a Keras model of any generation, or a `tf.Module`.
      optimizer: of Keras, of any generation; `iterations` counts its updates.
      every_n_steps: updates between two checkpoints; None saves at the end alone.
    Raises:
      TypeError: `every_n_steps` is not an integer.
      ValueError: it is below 1; eager execution is off; the model has no weights yet.
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
            raise ValueError(message(_OWNER, "there is no loop to go on with", "eager execution", "a graph", fix))
        if not getattr(model, "built", True):
            fix = "Begin the model with an Input, or call model.build(shape)."
            got = "a model without an input shape"
            raise ValueError(message(_OWNER, "the model has no weights yet", "a built model", got, fix))
        self._optimizer, self._every_n_steps = optimizer, every_n_steps
        checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
        self._manager = tf.train.CheckpointManager(checkpoint, os.fspath(folder), _KEPT)
        self._request, ranks = of_this_process(), collective.current()
        variables = variables_in_training(model, optimizer)
        if ranks.rank == 0 and self._manager.latest_checkpoint:
            checkpoint.restore(self._manager.latest_checkpoint)
            begin_anew(optimizer)
        ranks.broadcast_variables(variables, 0)
        self._saved = self._reached()

    def until(self, steps: int) -> Iterator[int]:
        """Gives the number of updates made so far, before each batch, until there are `steps`; then saves.

        A `break`, or an error, leaves the loop without saving.

        Ranks: collective; every rank makes the same number of turns.
        """
        with self._request.heeded(collective.current().size):
            while not self._is_over(steps):
                self._request.begin_run()
                yield self._reached()
        if self._request.is_due:
            self._request.leave(self._reached())

    def _is_over(self, steps):
        """Whether no batch is to follow; saves when it is time, between two updates."""
        reached = self._reached()
        is_last = reached >= steps or self._request.is_due
        if any(map(int, batches_waiting(self._optimizer))):
            return False
        is_time = is_last or bool(self._every_n_steps and reached >= self._saved + self._every_n_steps)
        if is_time and reached > self._saved:
            sync_if_needed(self._optimizer)
            self._saved = reached
            if collective.current().rank == 0:
                self._manager.save(checkpoint_number=reached)
        return is_last

    def _reached(self):
        return int(self._optimizer.iterations)
