"""Saves checkpoints. A save that fails or is killed leaves no files behind; TensorFlow's saver deletes the oldest.

A job holds the folder into which it saves, so that two jobs cannot overwrite each other's files.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import logging
import os
import re
import secrets
import weakref
from collections.abc import Iterator
from typing import Any, Callable

import tensorflow as tf

from npu_bridge.base.after_import import wrap_function
from npu_bridge.base.errors import message, say_once
from npu_bridge.base.files import finish_save, flush_to_disk, remove_unfinished_save
from npu_bridge.base.held_folders import FolderHeldError, FolderHold, hold_folder
from npu_bridge.base.session_wrapper import EnginePlace, SessionEngine
from npu_bridge.base.terminal import logger
from npu_bridge.base.tf_internals.savers import folder_of_saver_hook
from npu_bridge.collective.small_values import wait_for_ranks
from npu_bridge.collective.this_process import rank_and_size_of_job
from npu_bridge.session.damaged_checkpoints import find_checkpoint_damage

_LOG = logger(__name__)
# The errors TensorFlow raises for "no space left", "quota exceeded" and "file too large". The last one is also the
# error for the end of the data: a MonitoredSession would end the training as if it were complete.
NO_SPACE = (tf.errors.ResourceExhaustedError, tf.errors.OutOfRangeError)
_NOT_WRITTEN = (*NO_SPACE, tf.errors.DataLossError)


class WaitForSaves(SessionEngine):
    """A session engine that makes ranks wait, after their session is closed, until rank 0 has saved.

    A rank that then reads the folder of rank 0 (to predict from a checkpoint, for example) finds complete files.

    Attributes:
      is_over: whether the training has ended. After an error, ranks do not wait.

    Ranks: collective, when the session is closed.
    """

    place = EnginePlace.HOOKS

    def __init__(self):
        self.is_over = False

    def close(self, session):
        self.inner.close(session)
        if self.is_over:
            self.is_over = False
            wait_for_ranks("training_is_saved")


class CheckpointNotSavedError(OSError):
    """Raised when a checkpoint could not be written to the disk; the previous checkpoint is still the latest."""


class ModelDirInUseError(RuntimeError):
    """Raised when another job trains in the folder; the message says which job, since when, and the cure."""


def check_folder_name(owner: str, folder: str) -> None:
    """Raises a ValueError, which names `owner`, for a folder whose checkpoints TensorFlow would not find again."""
    if re.search(r"\[.+\]|\\", folder):
        expected, fix = "a path without [...] and \\, which TensorFlow takes for a pattern", "Choose another folder."
        raise ValueError(message(owner, "checkpoints in this folder would not be found again", expected, folder, fix))


def hold_model_dir(folder: str | None) -> FolderHold:
    """Holds a folder of checkpoints for this process's training until the result is released; reading needs no hold.

    Creates the folder if it is missing. A remote folder, or a folder that cannot be written to, is not held.

    Raises:
      ModelDirInUseError: another job trains in the folder.
      ValueError: the folder's name is a pattern.
    Ranks: local; for the rank that saves: rank 0, or the chief of a cluster.
    """
    check_folder_name("model_dir", folder or "")
    _make_folder(folder)
    try:
        return hold_folder(folder or "", "training", "a training")
    except FolderHeldError as error:
        raise ModelDirInUseError(f"model_dir: {error}") from None


def _make_folder(folder):
    if folder and "://" not in folder:
        with contextlib.suppress(OSError):  # the first write reports the error
            os.makedirs(folder, exist_ok=True)


@functools.cache
def hold_for_saver_hooks() -> None:
    """Makes every `tf.estimator.CheckpointSaverHook` hold its folder from `begin` to `end`; another call has no effect.

    Estimators and MonitoredTrainingSessions save with this hook. After an error `end` is not called: the folder
    is then released when the hook is deleted or the process ends. A hook with an attribute `holds_its_folder` holds and
    releases its folder itself.
    """
    releases: weakref.WeakKeyDictionary[Any, Callable] = weakref.WeakKeyDictionary()

    def release_folder(hook):
        releases.pop(hook, lambda: None)()

    def begin_and_hold_folder(begin, hook):
        if not getattr(hook, "holds_its_folder", False):
            release_folder(hook)
            releases[hook] = weakref.finalize(hook, hold_model_dir(folder_of_saver_hook(hook)).release)
        begin(hook)

    def end_and_release_folder(end, hook, session):
        try:
            end(hook, session)
        finally:
            release_folder(hook)

    wrap_function(tf.estimator.CheckpointSaverHook, "begin", begin_and_hold_folder)
    wrap_function(tf.estimator.CheckpointSaverHook, "end", end_and_release_folder)


@functools.cache
def watch_savers() -> None:
    """Warns if ranks of one job save into one folder with a `tf.compat.v1.train.Saver`; another call has no effect.

    A saver that does not write the file `checkpoint` is not watched, as its file names can differ by rank. In a job of
    one process, nothing is watched. The first two ranks that save keep a lock file in the folder as long as they live.
    """
    if rank_and_size_of_job()[1] == 1:
        return
    signature = inspect.signature(tf.compat.v1.train.Saver.save)

    def save_and_check(save, *arguments, **keywords):
        bound = signature.bind(*arguments, **keywords).arguments
        if bound.get("write_state", True):
            _warn_of_shared_folder(os.path.dirname(bound["save_path"]) or ".")
        return save(*arguments, **keywords)

    wrap_function(tf.compat.v1.train.Saver, "save", save_and_check)


@functools.cache
def _warn_of_shared_folder(folder: str) -> None:
    """Warns that another rank saves into this folder, too, unless another rank has already warned."""
    _make_folder(folder)
    with contextlib.suppress(FolderHeldError):  # by another job, which does not concern a plain saver
        other = hold_folder(folder, "saves", "a saver").holder
        if other is None or hold_folder(folder, "saves_told", "a saver").holder is not None:
            return
        ranks = " and ".join(str(rank) for rank in sorted((other, rank_and_size_of_job()[0])))
        problem = f"ranks {ranks} save into one folder, so each overwrites files of the other"
        fix = "Write checkpoint_dir=folder if get_rank_id() == 0 else None, or let rank 0 alone call save."
        say_once(
            logging.WARNING,
            message("checkpoint", problem, "one rank that saves", f"two that save into {folder!r}", fix),
        )


class CarefulSaver:
    """A wrapper of a `tf.compat.v1.train.Saver` that deletes the files of a save that failed.

    TensorFlow writes a checkpoint under temporary names, renames it when it is complete, and then deletes older
    checkpoints. When a save fails, this class deletes its half-written files, as they take space on the disk. It also
    removes the failed checkpoint from the saver's list of checkpoints to keep.

    Ranks: local.
    """

    def __init__(self, saver: Any, hold: FolderHold | None = None):
        self._saver, self._hold = saver, hold
        self.saver_def = saver.saver_def

    def save(self, session: Any, save_path: str, global_step: int, write_meta_graph: bool = True) -> str | None:
        """Saves variables as `tf.compat.v1.train.Saver.save` does; returns the path prefix of the checkpoint.

        Raises:
          CheckpointNotSavedError: there is no space, or the files cannot be read.
          FolderHeldError: another job has taken over the folder.
        """
        if self._hold is not None:
            self._hold.check_still_held()
        prefix = f"{save_path}-{global_step}"
        kept, files = list(self._saver.last_checkpoints), set(tf.io.gfile.glob(f"{prefix}.*"))
        try:
            return self._saver.save(session, save_path, global_step=global_step, write_meta_graph=write_meta_graph)
        except _NOT_WRITTEN as error:
            folder = os.path.dirname(save_path)
            latest = tf.train.latest_checkpoint(folder)
            if prefix not in (latest, *kept):
                self._remove_failed_save(prefix, files, kept)
            raise CheckpointNotSavedError(_not_saved_message(f"step {global_step}", folder, error)) from error

    def _remove_failed_save(self, prefix, files, earlier_checkpoints):
        self._saver.recover_last_checkpoints(earlier_checkpoints)
        if tf.io.gfile.exists(f"{prefix}_temp"):
            remove_unfinished_save(f"{prefix}_temp")
        for file in set(tf.io.gfile.glob(f"{prefix}.*")) - files:
            remove_unfinished_save(file, is_new=True)


@contextlib.contextmanager
def failing_if_disk_full(file: str) -> Iterator[None]:
    """Raises an error if the block finds no space for a file, after deleting the half-written file.

    The block must write the file as TensorFlow does: under a temporary name, then renamed.

    Raises:
      CheckpointNotSavedError: there is no space.
    """
    before = set(tf.io.gfile.glob(f"{file}.tmp*"))
    try:
        yield
    except NO_SPACE as error:
        for half_written in set(tf.io.gfile.glob(f"{file}.tmp*")) - before:
            remove_unfinished_save(half_written, is_new=True)
        raise CheckpointNotSavedError(
            _not_saved_message(os.path.basename(file), os.path.dirname(file), error)
        ) from error


def save_unless_disk_is_full(owner: str, save: Callable[[], object], unfinished: str) -> bool:
    """Calls `save`; if the disk is full, logs an error, removes unfinished files, and returns False.

    Args:
      owner: name of the caller, for the log.
      save: function that saves, or waits for a save.
      unfinished: pattern of the names of unfinished files.
    """
    try:
        save()
    except (OSError, *NO_SPACE) as error:
        if isinstance(error, OSError) and error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        for leftover in tf.io.gfile.glob(unfinished):
            remove_unfinished_save(leftover, is_new=True)
        problem, expected = "the disk is full, so one save is missing", "space for the next save, which replaces it"
        fix = "Free some space; the previous save is still there."
        _LOG.error("%s", message(owner, problem, expected, str(error).strip().splitlines()[0], fix))
        return False
    return True


def write_checkpoint_file(file: str, content: bytes) -> None:
    """Writes a file of a checkpoint as a whole; raises `CheckpointNotSavedError` if there is no space."""
    with failing_if_disk_full(file):
        unfinished = f"{file}.tmp{secrets.token_hex(8)}"
        with tf.io.gfile.GFile(unfinished, "wb") as written:
            written.write(content)
        finish_save(unfinished, file)


def copy_checkpoint(source: str, target: str) -> None:
    """Copies the files of a checkpoint; the copies get their names when all are on the disk and can be read.

    Args:
      source, target: paths of the checkpoints, without the endings of the files.
    Raises:
      tf.errors.OpError: the copy cannot be written; ResourceExhaustedError if there is no space.
      tf.errors.DataLossError: the copy cannot be read.
    """
    folder = f"{target}_temp"
    unfinished = os.path.join(folder, "part")
    tf.io.gfile.makedirs(folder)
    endings = [file[len(source) :] for file in tf.io.gfile.glob(f"{source}.*")]
    try:
        for ending in endings:
            tf.io.gfile.copy(source + ending, unfinished + ending, overwrite=True)
            flush_to_disk(unfinished + ending)
        damage = find_checkpoint_damage(unfinished)
        if damage is not None:
            raise tf.errors.DataLossError(None, None, f"{damage.file}: {damage.reason}")
        # The index comes last: without it the files are no checkpoint.
        for ending in sorted(endings, key=".index".__eq__):
            finish_save(unfinished + ending, target + ending)
    finally:
        remove_unfinished_save(folder)


def remove_leftovers(folder: str, basename: str) -> None:
    """Deletes the half-written files of a process that held the folder and is known to be dead."""
    of_checkpoint = rf"{re.escape(basename)}-\d+(_temp(_\w+)?|\..*\.(tempstate|tmp)\w+)"
    half_written = re.compile(rf"{of_checkpoint}|(checkpoint|graph\.pbtxt)\.tmp\w+")
    for name in tf.io.gfile.listdir(folder) if tf.io.gfile.isdir(folder) else ():
        path = os.path.join(folder, name.rstrip("/"))
        if half_written.fullmatch(name.rstrip("/")):
            _LOG.info("Removed %s, left by an interrupted save.", path)
            remove_unfinished_save(path)


def _not_saved_message(what, folder, error):
    latest = tf.train.latest_checkpoint(folder)
    # In a long message the cause is above the line that names the operator.
    found = re.search(r"([^\n]+)\n\s*\[\[", error.message)
    reason = found.group(1) if found else error.message.strip().splitlines()[-1]
    is_damaged = isinstance(error, tf.errors.DataLossError)
    fix = "Check the disk" if is_damaged else "Free some space"
    return message(
        "checkpoint",
        f"{what} is not saved",
        f"files in {folder} that can be read" if is_damaged else f"space in {folder}",
        f"{type(error).__name__}: {reason}",
        f"{fix}; the latest checkpoint is {os.path.basename(latest) if latest else 'none'}.",
    )
