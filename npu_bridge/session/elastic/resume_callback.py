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
from npu_bridge.base.errors import listed, message
from npu_bridge.base.files import UNFINISHED, flush_to_disk, rename_unfinished
from npu_bridge.base.memory_folders import keeps_state_in_memory
from npu_bridge.base.tf_internals import keras3
from npu_bridge.base.tf_internals.callers import callbacks_in_training
from npu_bridge.base.train_functions import TrainedBatches
from npu_bridge.collective.apart import run_in_separate_graph
from npu_bridge.collective.small_values import gather_values, wait_for_ranks
from npu_bridge.gradients.checkpoints.sync import (
    batch_counters,
    count_batches,
    reset_restarting_state,
    sync_if_needed,
)
from npu_bridge.gradients.first_step.start_values import send_restored_state
from npu_bridge.gradients.keras.in_graphs import build_optimizer
from npu_bridge.session.checkpoints import save_unless_disk_is_full
from npu_bridge.session.elastic.background_saves import BackgroundWriter
from npu_bridge.session.elastic.memory_checkpoints import CopyInterval, memory_checkpoints
from npu_bridge.session.elastic.model_files import (
    BATCHES_DONE,
    is_intact_zip,
    load_model,
    read_batches_done,
    read_json,
)
from npu_bridge.session.elastic.stop_request import WholeUpdates, stop_request_of_process
from npu_bridge.session.optimizer_numbers import optimizer_in_scaling, optimizer_numbers

_NUMBERS = "optimizer_numbers.json"  # in the file of the model
_COUNTERS, _BEST_WEIGHTS = "counters_of_callbacks.json", "best_weights/{}/{}"  # likewise
# Attributes by which callbacks of Keras decide; all but ModelCheckpoint reset them when a fit begins.
_COUNTING = ("EarlyStopping", "ReduceLROnPlateau", "ModelCheckpoint", "SwapEMAWeights")
# Between two epochs, SwapEMAWeights of Keras 3 has the averages in the model, and the weights in the optimizer.
_SWAPPED = "_ema_weights_in_model"
_COUNTED = ("best", "wait", "cooldown_counter", "best_epoch", _SWAPPED)


class ResumeCallback(tf.keras.callbacks.Callback):
    """A callback that saves the model every few steps and at the end of training, so that a later run can resume.

    Rank 0 saves with `model.save`, and replaces the old file in one move: a job that is killed leaves a complete file.
    `restore` loads weights, optimizer, counters and loss scale on rank 0, and sends them to the other ranks.
    Hyperparameters that callbacks such as `LearningRateScheduler` had set in the optimizer are restored.
    `EarlyStopping`, `ReduceLROnPlateau` and `ModelCheckpoint` in the same `fit` keep their counters, and
    `SwapEMAWeights` knows whether it has swapped. At the end of an
    epoch the model is saved after all other callbacks, wherever in the list this callback is. When a scheduler reclaims
    the machine (SIGTERM), or the job changes its size, all ranks complete their step, the model is saved, and the
    process ends with exit code 75. With several ranks this needs `npu-run`.

    The model is saved to memory, and copied to the disk in the background; the new file is read back before it replaces
    the old file. At the end of `fit`, all ranks wait for the file of rank 0. In a job that `npu-run` restarts
    (`--min-np`, `--restarts`), rank 0 also keeps a copy in memory every N batches; N is chosen so that copies take
    0.5 % of the time. `restore` uses this copy if it is newer than the file.

    Args:
      path: path of the saved model, ending in ".keras".
      every_n_steps: steps between two saves; None saves at the end of each epoch.
    Raises:
      ValueError: `path` has another ending, or `every_n_steps` is below 1. When `fit` begins: the model has several
        optimizers.
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
            fix = "Change the ending: other formats of Keras leave parts of the optimizer out."
            raise ValueError(
                message("ResumeCallback", "path is not the name of a saved model", "a .keras file", self._path, fix)
            )
        if "://" in self._path:
            problem, fix = "path is not a local path", "ResumableLoop also saves to remote folders."
            raise ValueError(message("ResumeCallback", problem, "a path of a local disk", self._path, fix))
        if every_n_steps is not None:
            every_n_steps = check_count(
                "ResumeCallback", "every_n_steps", every_n_steps, "Leave it out to save after epochs."
            )
        self._every_n_steps = every_n_steps
        # Batches of the model, and batches since the last save.
        self._batches_done, self._unsaved_batches, self._batches = 0, 0, TrainedBatches()
        self._request, self._updates = stop_request_of_process(), WholeUpdates()
        self._copies = self._interval = None
        self._callbacks: list = []  # of this fit
        self._counters: dict = {}  # restored values, for the first epoch
        # Called after the others, which change numbers at the end of an epoch, and note what a batch has given.
        self._last_callback = tf.keras.callbacks.LambdaCallback(
            on_train_batch_end=self._end_batch, on_epoch_end=self._end_epoch, on_train_end=self._end_training
        )
        self._writer = BackgroundWriter()
        self._is_saved = True  # on rank 0: no save is missing because the disk was full
        self._signal_handling = contextlib.ExitStack()
        weakref.finalize(self, self._signal_handling.close)  # `fit` can end with an error

    def restore(self, model: tf.keras.Model) -> int:
        """Loads the saved state, if there is any, into a compiled model.

        Returns:
          The number of batches that this model was trained on, including skipped steps; the same number on every rank.
        Raises:
          ValueError: the optimizer is a legacy optimizer, or not the only one of the model. Or the model has no weights
            yet because its input shape is unknown, or the saved model is another one.
        Ranks: collective.
        """
        _check_optimizers(model)
        optimizer = model.optimizer
        if isinstance(optimizer, tf.keras.optimizers.legacy.Optimizer):
            problem, fix = "Keras saves no legacy optimizer in a .keras file", "Use tf.keras.optimizers instead."
            got = type(optimizer).__name__
            raise ValueError(message("ResumeCallback", problem, "an optimizer of tf.keras.optimizers", got, fix))
        path, done = self._find_newest_save() if collective.current().rank == 0 else (None, 0)
        saved: dict = {}
        counters: dict = {}
        if path is not None:
            if not model.built:
                fix = "Begin the model with an Input, or call model.build(shape)."
                got = "a model without an input shape"
                raise ValueError(message("ResumeCallback", "the model has no weights yet", "a built model", got, fix))
            build_optimizer(optimizer, model.trainable_variables)
            load_model(model, path)
            reset_restarting_state(optimizer)
            self._batches_done = count_batches(optimizer) if done is None else done
            saved, counters = read_json(path, _NUMBERS), read_json(path, _COUNTERS)
        is_found, self._batches_done, saved, self._counters = gather_values(
            [path is not None, self._batches_done, saved, counters], "resume_callback"
        )[0]
        if is_found:
            send_restored_state(model)
        for key, numbers in self._counters.items():
            if numbers.pop("has_weights"):
                numbers["best_weights"] = _read_best_weights(path, key, model)
        now = optimizer_numbers(optimizer)
        for name, number in saved.items():
            if name in now and now[name] != number:
                setattr(optimizer_in_scaling(optimizer), name, number)
        return self._batches_done

    def on_train_begin(self, logs=None):
        _check_optimizers(self.model)
        self._signal_handling.close()
        self._signal_handling.enter_context(self._request.handle_requests(collective.current().size))
        self._batches.begin_fit(self.model)
        self._copies = memory_checkpoints(self._path) if collective.current().rank == 0 else None
        self._interval = CopyInterval() if keeps_state_in_memory() else None
        self._callbacks = callbacks_in_training()
        if self._last_callback in self._callbacks:  # a list of the caller that serves several fits
            self._callbacks.remove(self._last_callback)
        self._callbacks.append(self._last_callback)
        swapping = _callbacks_with_counters(self._callbacks)
        for key, numbers in self._counters.items():
            if numbers.pop(_SWAPPED, False):
                if key not in swapping:
                    problem, expected = "the saved weights are averages", "SwapEMAWeights in the callbacks, as before"
                    raise ValueError(message("ResumeCallback", problem, expected, "no such callback", "Add it again."))
                vars(swapping[key])[_SWAPPED] = True  # here, as the callback may come before this one in an epoch

    def on_epoch_begin(self, epoch, logs=None):
        counting = _callbacks_with_counters(self._callbacks)
        for key, numbers in self._counters.items():
            if key in counting:
                vars(counting[key]).update(numbers)
        self._counters = {}

    def on_train_batch_begin(self, batch, logs=None):
        self._request.begin_run()

    def on_train_batch_end(self, batch, logs=None):
        steps = self._batches.count_new()
        self._batches_done, self._unsaved_batches = self._batches_done + steps, self._unsaved_batches + steps
        if self._every_n_steps and self._unsaved_batches >= self._every_n_steps:
            self._save_to_disk()
        if self._interval is not None and self._interval.count_run_and_check_due():
            with self._interval.measured_copy():
                self._save_to_memory()
        if self._callbacks == [self._last_callback]:  # in a loop without a list of callbacks
            self._end_batch(batch, logs)

    def on_epoch_end(self, epoch, logs=None):
        if self._callbacks == [self._last_callback]:
            self._end_epoch(epoch, logs)

    def on_train_end(self, logs=None):
        if self._callbacks == [self._last_callback]:
            self._end_training(logs)

    def _end_batch(self, batch, logs):
        if self._request.is_due and not self._updates.is_waiting(batch_counters(self.model.optimizer)):
            if self._unsaved_batches:
                self._save_to_disk()
            self._finish_saving()
            for callback in self._callbacks:
                if getattr(callback, "ends_with_process", False):
                    callback.on_train_end()
            self._request.exit_after_save(int(self.model.optimizer.iterations))

    def _end_epoch(self, epoch, logs):
        if not self._every_n_steps or not self._unsaved_batches:  # saved before others have seen the end of the epoch
            self._save_to_disk()

    def _end_training(self, logs):
        self._save_to_disk()
        self._finish_saving()
        wait_for_ranks("resume_callback_end")

    def _finish_saving(self):
        """Waits until the model is on the disk, and removes the copies in memory."""
        self._signal_handling.close()
        if collective.current().rank == 0:
            self._is_saved = self._is_saved and self._try(self._writer.wait)
            if not self._is_saved:
                self._write_to_disk(None)
        if self._interval is not None:
            self._interval.close()
            self._interval = None
        if self._copies is not None:
            self._copies.remove_copies()

    def _find_newest_save(self):
        """Returns the path of the newest saved model, and the number of batches on which it was trained.

        The path is None if there is no saved model. The number is None if the file does not hold it.
        """
        copies = memory_checkpoints(self._path)
        found = [(read_batches_done(self._path), self._path)] if os.path.exists(self._path) else []
        kept = copies and copies.find_newest()
        if kept:
            path = f"{kept[1]}.keras"
            is_newer = not found or (found[0][0] is not None and kept[0] > found[0][0])
            if (is_newer or not is_intact_zip(self._path)) and is_intact_zip(path):
                return path, kept[0]
        return (found[0][1], found[0][0]) if found else (None, 0)

    def _save_to_memory(self):
        """Saves the model to memory on rank 0; returns the path, or None if this is not possible."""
        sync_if_needed(self.model.optimizer)
        if self._copies is None:
            return None
        # Weights, and up to three slots of each.
        path = self._copies.write(self._write_model, self._batches_done, 4 * 4 * self.model.count_params())
        return path and f"{path}.keras"

    def _save_to_disk(self):
        """Saves on rank 0; if its disk is full, logs an error, and `_finish_saving` saves again."""
        self._unsaved_batches = 0
        self._try(self._writer.wait)
        path = self._save_to_memory()
        if collective.current().rank == 0:
            self._is_saved = self._try(lambda: self._write_to_disk(path))

    def _try(self, save):
        return save_unless_disk_is_full("ResumeCallback", save, self._unfinished)

    @property
    def _unfinished(self):
        folder, name = os.path.split(self._path)
        return os.path.join(folder, UNFINISHED + name)  # the same each time: a kill leaves one at most

    def _write_to_disk(self, path):
        """Writes the file of the model, in the background if `path` names a copy of the model in memory."""
        os.makedirs(os.path.dirname(self._path) or ".", exist_ok=True)
        if path is None:
            self._write_model(self._unfinished.removesuffix(".keras"))
            rename_unfinished(self._unfinished, self._path)
        else:
            self._writer.start(self._copies, path, lambda: self._copy_to_disk(path, self._unfinished))

    def _write_model(self, path):
        """Writes the model, the number of batches, and state of optimizer and callbacks that Keras does not save."""
        self.model.save(f"{path}.keras")
        counters = {}
        with zipfile.ZipFile(f"{path}.keras", "a") as saved:
            for key, callback in _callbacks_with_counters(self._callbacks).items():
                found = {name: vars(callback)[name] for name in _COUNTED if name in vars(callback)}
                counters[key] = {n: v if v is None or isinstance(v, int) else float(v) for n, v in found.items()}
                weights = getattr(callback, "best_weights", None)
                counters[key]["has_weights"] = weights is not None
                for number, value in enumerate(weights or ()):
                    saved.writestr(_BEST_WEIGHTS.format(key, number), tf.io.serialize_tensor(value).numpy())
            saved.writestr(BATCHES_DONE, str(self._batches_done))
            saved.writestr(_NUMBERS, json.dumps(optimizer_numbers(self.model.optimizer)))
            saved.writestr(_COUNTERS, json.dumps(counters))

    def _copy_to_disk(self, path, unfinished):
        tf.io.gfile.copy(path, unfinished, overwrite=True)
        flush_to_disk(unfinished)
        if not is_intact_zip(unfinished):
            problem, fix = "a saved model cannot be read back", "Check the disk; the previous file is still there."
            raise OSError(message("ResumeCallback", problem, f"{self._path} as it was written", "other bytes", fix))
        rename_unfinished(unfinished, self._path)


def _check_optimizers(model):
    """Raises a ValueError if an attribute of a model holds an optimizer that is no part of `model.optimizer`."""
    own, part = [], model.optimizer
    while part is not None:
        own += tf.train.TrackableView(part).descendants()
        part = getattr(part, "inner_optimizer", None)
    kinds = (tf.keras.optimizers.Optimizer, tf.keras.optimizers.legacy.Optimizer)
    others = [
        name
        for name, value in vars(model).items()
        for each in (value if isinstance(value, (list, tuple)) else [value])
        if isinstance(each, kinds) or keras3.is_optimizer(each)
        if name == "optimizer" and each is not value or not any(each is one for one in own)
    ]
    if others:
        problem, fix = "the other optimizers of this model would not resume", "Save it with tf.train.Checkpoint."
        raise ValueError(
            message("ResumeCallback", problem, "model.optimizer alone", f"optimizers in {listed(others)}", fix)
        )


def _callbacks_with_counters(callbacks):
    """Returns Keras' callbacks that keep counters, in a dict whose keys are the same in every run of a script."""
    found: dict = {}
    generations = filter(None, [tf.keras, keras3.loaded_keras3()])
    kinds = tuple(getattr(each.callbacks, name, ()) for each in generations for name in _COUNTING)
    for callback in callbacks:
        if isinstance(callback, kinds):
            kind = type(callback).__name__
            # Numbered by class: other ranks can lack callbacks of another class.
            found[f"{kind}_{sum(type(each).__name__ == kind for each in found.values())}"] = callback
    return found


def _read_best_weights(path, key, model):
    """Reads on rank 0 the best weights that a callback has kept, and returns them on every rank."""
    weights = model.get_weights()  # with the dtypes and shapes of the saved weights
    if path is not None:
        with zipfile.ZipFile(path) as saved:
            texts = [saved.read(_BEST_WEIGHTS.format(key, number)) for number in range(len(weights))]
        weights = [tf.io.parse_tensor(text, each.dtype).numpy() for text, each in zip(texts, weights)]
    ranks = collective.current()
    if ranks.size == 1:
        return weights
    return run_in_separate_graph(lambda *given: [ranks.broadcast(each, 0, "best_weights") for each in given], *weights)
