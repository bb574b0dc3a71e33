"""`ResumeCallback`: a `fit` that was interrupted goes on where its model was saved last."""

from __future__ import annotations

import contextlib
import os
import weakref
import zipfile

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base.arguments import check_count
from npu_bridge.base.errors import message
from npu_bridge.base.files import UNFINISHED, put_in_place
from npu_bridge.collective.exchanges import gather_values
from npu_bridge.gradients.sync import batches_waiting, begin_anew, sync_if_needed
from npu_bridge.session.elastic.stop_request import of_this_process

_DONE = "batches_done.txt"  # in the file of the model


class ResumeCallback(tf.keras.callbacks.Callback):
    """Saves the model every few steps and at the end of training; a later run goes on from there.

    Rank 0 saves, in one move: whenever the job is killed, there is a whole file, that of `model.save`. `restore` loads
    weights, optimizer, counters and loss scale into rank 0's model; `npu_callbacks_append` sends them to the others.
    When a scheduler wants the machine back (SIGTERM), or the job changes its size, all ranks complete the step they are
    in, the model is saved, and the process ends with exit code 75. With several ranks that needs `npu-run`.

    Args:
      path: of the saved model, ending in ".keras".
      every_n_steps: steps between two times it is saved; None for the end of each epoch.
    Raises:
      ValueError: `path` ends otherwise, or `every_n_steps` is below 1.
    Ranks: collective; give it to every rank.
    Example:
      >>> resume = ResumeCallback("out/model.keras", every_n_steps=100)
      >>> done = resume.restore(model)  # batches, the same number on every rank; 0 at the first start
      >>> model.fit(data.skip(done), steps_per_epoch=1000 - done, callbacks=npu_callbacks_append([resume]))
    """

    def __init__(self, path: str | os.PathLike, every_n_steps: int | None = None):
        super().__init__()
        self._path = os.fspath(path)
        if not self._path.endswith(".keras"):
            fix = "Use such a name: the other formats of Keras leave parts of the optimizer out."
            raise ValueError(message("ResumeCallback", "path names no saved model", "a .keras file", self._path, fix))
        if every_n_steps is not None:
            every_n_steps = check_count("ResumeCallback", "every_n_steps", every_n_steps, "Leave it out for epochs.")
        self._every_n_steps = every_n_steps
        # Batches of the model, of them since it was saved last, and the number of the latest one in its epoch.
        self._done, self._unsaved, self._batch = 0, 0, -1
        self._request = of_this_process()
        self._heeding = contextlib.ExitStack()
        weakref.finalize(self, self._heeding.close)  # `fit` may end with an error

    def restore(self, model: tf.keras.Model) -> int:
        """Loads what was saved into a compiled model, if anything was.

        Returns:
          The batches that this model was trained on, skipped steps included; the same on every rank.
        Raises:
          ValueError: the optimizer is a legacy one; the model has no weights yet, as it knows no shape of its input.
        Ranks: collective.
        """
        optimizer = model.optimizer
        if isinstance(optimizer, tf.keras.optimizers.legacy.Optimizer):
            problem, fix = "Keras saves no legacy optimizer in a .keras file", "Use tf.keras.optimizers instead."
            got = type(optimizer).__name__
            raise ValueError(message("ResumeCallback", problem, "an optimizer of tf.keras.optimizers", got, fix))
        if collective.current().rank == 0 and os.path.exists(self._path):
            if not model.built:
                fix = "Begin the model with an Input, or call model.build(shape)."
                got = "a model without an input shape"
                raise ValueError(message("ResumeCallback", "the model has no weights yet", "a built model", got, fix))
            optimizer.build(model.trainable_variables)
            model.load_weights(self._path)
            begin_anew(optimizer)
            self._done = self._read_done(optimizer)
        self._done = gather_values(self._done, "resume_callback")[0]
        return self._done

    def on_train_begin(self, logs=None):
        self._heeding.close()
        self._heeding.enter_context(self._request.heeded(collective.current().size))

    def on_epoch_begin(self, epoch, logs=None):
        self._batch = -1

    def on_train_batch_begin(self, batch, logs=None):
        self._request.begin_run()

    def on_train_batch_end(self, batch, logs=None):
        steps, self._batch = batch - self._batch, batch  # several in one execution, perhaps
        self._done, self._unsaved = self._done + steps, self._unsaved + steps
        if self._every_n_steps and self._unsaved >= self._every_n_steps:
            self._save()
        if self._request.is_due and not any(map(int, batches_waiting(self.model.optimizer))):
            if self._unsaved:
                self._save()
            self._heeding.close()
            self._request.leave(int(self.model.optimizer.iterations))

    def on_epoch_end(self, epoch, logs=None):
        if not self._every_n_steps:
            self._save()

    def on_train_end(self, logs=None):
        self._heeding.close()
        self._save()

    def _read_done(self, optimizer):
        with zipfile.ZipFile(self._path) as saved:
            if _DONE in saved.namelist():
                return int(saved.read(_DONE))
        # Somebody else has saved the model.
        return int(optimizer.iterations) + int(getattr(optimizer, "skipped_steps", 0) or 0)

    def _save(self):
        self._unsaved = 0
        sync_if_needed(self.model.optimizer)
        if collective.current().rank > 0:
            return
        folder, name = os.path.split(self._path)
        os.makedirs(folder or ".", exist_ok=True)
        unfinished = os.path.join(folder, UNFINISHED + name)  # the same each time: a kill leaves one at most
        self.model.save(unfinished)
        with zipfile.ZipFile(unfinished, "a") as saved:
            saved.writestr(_DONE, str(self._done))
        put_in_place(unfinished, self._path)
