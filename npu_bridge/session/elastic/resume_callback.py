"""`ResumeCallback`: resumes an interrupted `fit` from the last save of its model."""

from __future__ import annotations

import contextlib
import json
import os
import weakref
import zipfile

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base.arguments import check_count
from npu_bridge.base.errors import message
from npu_bridge.base.files import UNFINISHED, flush, put_in_place
from npu_bridge.base.memory_folders import is_kept_by_job
from npu_bridge.base.tf_internals.callers import callbacks_in_training
from npu_bridge.collective.apart import run_apart
from npu_bridge.collective.exchanges import gather_values
from npu_bridge.gradients.sync import batches_waiting, begin_anew, sync_if_needed
from npu_bridge.session.elastic.background_saves import BackgroundWriter
from npu_bridge.session.elastic.memory_checkpoints import CopyInterval, memory_checkpoints
from npu_bridge.session.elastic.stop_request import of_this_process
from npu_bridge.session.optimizer_numbers import optimizer_numbers

_DONE = "batches_done.txt"  # in the file of the model
_NUMBERS = "optimizer_numbers.json"  # likewise
_COUNTERS, _BEST_WEIGHTS = "counters_of_callbacks.json", "best_weights/{}/{}"  # likewise
# Keras' callbacks decide by these; all but ModelCheckpoint reset them when a fit begins.
_COUNTED = ("best", "wait", "cooldown_counter", "best_epoch")


class ResumeCallback(tf.keras.callbacks.Callback):
    """A callback that saves the model every few steps and at the end of training; a later run resumes from there.

    Rank 0 saves, in one move: whenever the job is killed, there is a whole file of `model.save`. `restore` loads
    weights, optimizer, counters and loss scale into rank 0's model; `npu_callbacks_append` sends them to the others.
    Numbers of the optimizer that callbacks such as `LearningRateScheduler` have set are set again, and
    `EarlyStopping`, `ReduceLROnPlateau` and `ModelCheckpoint` in the same `fit` continue to count. An epoch is saved
    after they have seen its end, wherever in the list this callback is.
    When a scheduler reclaims the machine (SIGTERM), or the job changes its size, all ranks complete their step, the
    model is saved, and the process ends with exit code 75. With several ranks this needs `npu-run`.

    The model is saved to memory, and copied to the disk in the background; the new file is read back before it
    replaces the old one. In a restarted job (`npu-run --min-np`, `--restarts`), rank 0 also keeps a copy in memory
    every N batches, which takes 0.5 % of the time, and `restore` uses it if it is newer.

    Args:
      path: path of the saved model, ending in ".keras".
      every_n_steps: steps between two saves; None saves at the end of each epoch.
    Raises:
      ValueError: `path` has another ending, or `every_n_steps` is below 1.
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
        # Batches of the model, batches since the last save, and the number of the latest one in its epoch.
        self._done, self._unsaved, self._batch = 0, 0, -1
        self._request = of_this_process()
        self._copies = self._interval = None
        self._callbacks: list = []  # of this fit
        self._counters: dict = {}  # restored values, for the first epoch
        # Called after the others, which change numbers at the end of an epoch.
        self._last = tf.keras.callbacks.LambdaCallback(on_epoch_end=self._end_epoch, on_train_end=self._end_training)
        self._writer = BackgroundWriter()
        self._heeding = contextlib.ExitStack()
        weakref.finalize(self, self._heeding.close)  # `fit` can end with an error

    def restore(self, model: tf.keras.Model) -> int:
        """Loads the saved state, if there is one, into a compiled model.

        Returns:
          The batches that this model was trained on, skipped steps included; the same on every rank.
        Raises:
          ValueError: the optimizer is a legacy one; the model has no weights yet, as its input shape is not known.
        Ranks: collective.
        """
        optimizer = model.optimizer
        if isinstance(optimizer, tf.keras.optimizers.legacy.Optimizer):
            problem, fix = "Keras saves no legacy optimizer in a .keras file", "Use tf.keras.optimizers instead."
            got = type(optimizer).__name__
            raise ValueError(message("ResumeCallback", problem, "an optimizer of tf.keras.optimizers", got, fix))
        path, done = self._newest() if collective.current().rank == 0 else (None, 0)
        saved: dict = {}
        counters: dict = {}
        if path is not None:
            if not model.built:
                fix = "Begin the model with an Input, or call model.build(shape)."
                got = "a model without an input shape"
                raise ValueError(message("ResumeCallback", "the model has no weights yet", "a built model", got, fix))
            optimizer.build(model.trainable_variables)
            model.load_weights(path)
            begin_anew(optimizer)
            self._done = _done_of(optimizer) if done is None else done
            saved, counters = _read(path, _NUMBERS), _read(path, _COUNTERS)
        self._done, saved, self._counters = gather_values([self._done, saved, counters], "resume_callback")[0]
        for key, numbers in self._counters.items():
            if numbers.pop("has_weights"):
                numbers["best_weights"] = _best_weights(path, key, model)
        now = optimizer_numbers(optimizer)
        for name, number in saved.items():
            if name in now and now[name] != number:
                setattr(optimizer, name, number)
        return self._done

    def on_train_begin(self, logs=None):
        self._heeding.close()
        self._heeding.enter_context(self._request.heeded(collective.current().size))
        self._copies = memory_checkpoints(self._path) if collective.current().rank == 0 else None
        self._interval = CopyInterval() if is_kept_by_job() else None
        self._callbacks = callbacks_in_training()
        if self._last in self._callbacks:  # a list of the caller that serves several fits
            self._callbacks.remove(self._last)
        self._callbacks.append(self._last)

    def on_epoch_begin(self, epoch, logs=None):
        self._batch = -1
        counting = _counting(self._callbacks)
        for key, numbers in self._counters.items():
            if key in counting:
                vars(counting[key]).update(numbers)
        self._counters = {}

    def on_train_batch_begin(self, batch, logs=None):
        self._request.begin_run()

    def on_train_batch_end(self, batch, logs=None):
        steps, self._batch = batch - self._batch, batch  # an execution can make several steps
        self._done, self._unsaved = self._done + steps, self._unsaved + steps
        if self._every_n_steps and self._unsaved >= self._every_n_steps:
            self._save()
        if self._interval is not None and self._interval.count_run():
            with self._interval.measured():
                self._copy()
        if self._request.is_due and not any(map(int, batches_waiting(self.model.optimizer))):
            if self._unsaved:
                self._save()
            self._end()
            self._request.leave(int(self.model.optimizer.iterations))

    def on_epoch_end(self, epoch, logs=None):
        if self._callbacks == [self._last]:  # in a loop without a list of callbacks
            self._end_epoch(epoch, logs)

    def on_train_end(self, logs=None):
        if self._callbacks == [self._last]:
            self._end_training(logs)

    def _end_epoch(self, epoch, logs):
        if not self._every_n_steps or not self._unsaved:  # saved before others have seen the end of the epoch
            self._save()

    def _end_training(self, logs):
        self._save()
        self._end()

    def _end(self):
        """Waits until everything is on the disk, and removes the copies in memory."""
        self._heeding.close()
        self._writer.wait()
        if self._interval is not None:
            self._interval.close()
            self._interval = None
        if self._copies is not None:
            self._copies.forget()

    def _newest(self):
        """Returns the newest file, or None, and the batches it was trained on; None if it does not say."""
        found = [(_read_done(self._path), self._path)] if os.path.exists(self._path) else []
        copies = memory_checkpoints(self._path, of_job=True)
        kept = copies and copies.newest()
        if kept:
            path = f"{kept[1]}.keras"
            is_newer = not found or (found[0][0] is not None and kept[0] > found[0][0])
            if (is_newer or not _is_intact(self._path)) and _is_intact(path):
                return path, kept[0]
        return (found[0][1], found[0][0]) if found else (None, 0)

    def _copy(self):
        """Saves the model to memory on rank 0; returns the path, None if this is not possible."""
        sync_if_needed(self.model.optimizer)
        if self._copies is None:
            return None
        # Weights, and up to three slots of each.
        path = self._copies.write(self._write, self._done, 4 * 4 * self.model.count_params())
        return path and f"{path}.keras"

    def _save(self):
        self._unsaved = 0
        self._writer.wait()
        path = self._copy()
        if collective.current().rank > 0:
            return
        folder, name = os.path.split(self._path)
        os.makedirs(folder or ".", exist_ok=True)
        unfinished = os.path.join(folder, UNFINISHED + name)  # the same each time: a kill leaves one at most
        if path is None:
            self._write(unfinished.removesuffix(".keras"))
            put_in_place(unfinished, self._path)
            return
        self._writer.start(self._copies, path, lambda: self._copy_to_disk(path, unfinished))

    def _write(self, path):
        """Saves the model, the number of batches it was trained on, and the numbers that Keras leaves out."""
        self.model.save(f"{path}.keras")
        counters = {}
        with zipfile.ZipFile(f"{path}.keras", "a") as saved:
            for key, callback in _counting(self._callbacks).items():
                found = {name: vars(callback)[name] for name in _COUNTED if name in vars(callback)}
                counters[key] = {name: None if value is None else float(value) for name, value in found.items()}
                weights = getattr(callback, "best_weights", None)
                counters[key]["has_weights"] = weights is not None
                for number, value in enumerate(weights or ()):
                    saved.writestr(_BEST_WEIGHTS.format(key, number), tf.io.serialize_tensor(value).numpy())
            saved.writestr(_DONE, str(self._done))
            saved.writestr(_NUMBERS, json.dumps(optimizer_numbers(self.model.optimizer)))
            saved.writestr(_COUNTERS, json.dumps(counters))

    def _copy_to_disk(self, path, unfinished):
        tf.io.gfile.copy(path, unfinished, overwrite=True)
        flush(unfinished)
        if not _is_intact(unfinished):
            problem, fix = "a saved model cannot be read back", "Check the disk; the previous file is still there."
            raise OSError(message("ResumeCallback", problem, f"{self._path} as it was", "other bytes", fix))
        put_in_place(unfinished, self._path)


def _read_done(path):
    """Reads the number of batches that a saved model was trained on; None if another program saved it."""
    with contextlib.suppress(zipfile.BadZipFile), zipfile.ZipFile(path) as saved:
        return int(saved.read(_DONE)) if _DONE in saved.namelist() else None
    return None  # loading the file raises the error


def _read(path, name):
    with zipfile.ZipFile(path) as saved:
        return json.loads(saved.read(name)) if name in saved.namelist() else {}


def _counting(callbacks):
    """Returns callbacks that decide by counters, by a name that is the same in every run of a script."""
    found: dict = {}
    for callback in callbacks:
        if any(name in vars(callback) for name in _COUNTED):
            kind = type(callback).__name__
            # Numbered by class: other ranks can lack callbacks of another class.
            found[f"{kind}_{sum(type(each).__name__ == kind for each in found.values())}"] = callback
    return found


def _best_weights(path, key, model):
    """Returns on every rank the weights that a callback keeps, which rank 0 reads from a path."""
    weights = model.get_weights()  # of the same dtypes and shapes
    if path is not None:
        with zipfile.ZipFile(path) as saved:
            texts = [saved.read(_BEST_WEIGHTS.format(key, number)) for number in range(len(weights))]
        weights = [tf.io.parse_tensor(text, each.dtype).numpy() for text, each in zip(texts, weights)]
    ranks = collective.current()
    if ranks.size == 1:
        return weights
    return run_apart(lambda *given: [ranks.broadcast(each, 0, "best_weights") for each in given], *weights)


def _done_of(optimizer):
    return int(optimizer.iterations) + int(getattr(optimizer, "skipped_steps", 0) or 0)


def _is_intact(path):
    with contextlib.suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(path) as saved:
        return saved.testzip() is None
    return False
