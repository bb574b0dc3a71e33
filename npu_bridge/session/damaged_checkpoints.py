"""Checks checkpoints for damage before they are restored, and finds the newest intact checkpoint.

TensorFlow notices damage when it restores a checkpoint, and raises errors that name a node of the graph. If TensorFlow
cannot read the file `checkpoint`, which names the newest checkpoint, it starts from initial values and logs nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from typing import Callable, NamedTuple

import tensorflow as tf

from npu_bridge.base.environment import BEGAN, RESTARTS, read_variable
from npu_bridge.base.errors import message, shortened
from npu_bridge.base.files import write_checkpoint_list
from npu_bridge.base.terminal import logger
from npu_bridge.base.tf_internals.savers import key_and_slice_of

_LOG = logger(__name__)
_STATE = "checkpoint"
_NOT_RESTORED = "Restoring from checkpoint failed"
_LONGEST_REASON = 400
# A reader raises these errors for an intact tensor whose dtype numpy does not have.
_UNREADABLE_DTYPES = (tf.errors.InternalError, tf.errors.UnimplementedError)
_LEAST_AGE_SECS = 2.0
# By folder: names, sizes and times of the files of the checkpoint that was found intact last.
_intact_files: dict[str, list[tuple[str, int, int]]] = {}


class DamagedCheckpointError(RuntimeError):
    """Raised when a checkpoint cannot be read; the message names the file and the newest intact checkpoint."""


class _CheckpointDamage(NamedTuple):
    file: str
    reason: str


def check_newest_checkpoint(folder: str | None, may_use_older: bool = False) -> None:
    """Checks the newest checkpoint of a folder by reading all of it; takes 0.2 s for a gigabyte in the page cache.

    Args:
      folder: the folder of the checkpoints; None or an empty folder is accepted.
      may_use_older: instead of raising, list the newest intact checkpoint as the newest of the folder, and log this.
        Works only in a job that the launcher restarts on failure. The files of the damaged checkpoint stay.
    Raises:
      DamagedCheckpointError: the newest checkpoint is damaged or unknown.
    Ranks: local.
    """
    is_listed = bool(folder) and tf.io.gfile.exists(os.path.join(folder, _STATE))
    if not folder or not (is_listed or (may_use_older and _has_lost_checkpoint_list(folder))):
        return
    listed = _listed_checkpoints(folder)
    unlisted = _CheckpointDamage(
        os.path.join(folder, _STATE), "a file that names no checkpoint" if is_listed else "no such file"
    )
    damage = find_checkpoint_damage(listed[-1]) if listed else unlisted
    if damage is None:
        return
    if _listed_checkpoints(folder)[-1:] != listed[-1:]:  # a training has saved a newer one, and removed this one
        check_newest_checkpoint(folder, may_use_older)
        return
    intact = _find_newest_intact_checkpoint(folder, listed[:-1])
    if not may_use_older or intact is None or read_variable(RESTARTS) is None:
        raise DamagedCheckpointError(_damage_message(damage, _restore_hint(folder, intact)))
    list_checkpoints(folder, [*(path for path in listed[:-1] if _step_of(path) < _step_of(intact)), intact])
    _LOG.warning("%s", _damage_message(damage, f"Training resumes from {_shorten_listed_path(folder, intact)}."))


def check_checkpoint(path: str) -> None:
    """Checks a checkpoint by reading all of it; raises nothing for a missing checkpoint.

    Args:
      path: the checkpoint, without the endings of its files; or a folder, for its newest checkpoint.
    Raises:
      DamagedCheckpointError: the checkpoint is damaged.
    Ranks: local.
    """
    if tf.io.gfile.isdir(path):
        check_newest_checkpoint(path)
    elif tf.io.gfile.exists(f"{path}.index"):
        damage = find_checkpoint_damage(path)
        if damage is not None:
            intact = _find_newest_intact_checkpoint(os.path.dirname(path) or ".", [])
            there = (
                f"Restore the newest intact checkpoint, {os.path.basename(intact)}."
                if intact
                else "No checkpoint in its folder is intact."
            )
            raise DamagedCheckpointError(_damage_message(damage, there))


@contextlib.contextmanager
def mismatches_explained(folder: str) -> Iterator[None]:
    """Replaces TensorFlow's error about a checkpoint of another model; the new error names a variable that differs.

    The `with` block restores the checkpoint.

    Args:
      folder: the folder whose newest checkpoint is restored.
    Raises:
      tf.errors.InvalidArgumentError, tf.errors.NotFoundError: as TensorFlow, with the name and shapes of the variable.
    """
    try:
        yield
    except (tf.errors.InvalidArgumentError, tf.errors.NotFoundError) as error:
        # TensorFlow restores a resource variable whatever its shape, and fails in the first step.
        newest = tf.train.latest_checkpoint(folder) if error.op is not None else None
        found = newest and _describe_first_differing_variable(error.op.graph, newest, _NOT_RESTORED in error.message)
        if not found:
            raise
        fix = "Train in another model_dir, or build the model that was saved."
        problem = f"{newest} is a checkpoint of another model"
        raise type(error)(None, None, message("checkpoint", problem, *found, fix)) from None


def _describe_first_differing_variable(graph, prefix, reports_missing):
    """Describes the first variable that differs: returns a text for the graph and one for the checkpoint, or None."""
    shapes = tf.train.load_checkpoint(prefix).get_variable_to_shape_map()
    variables = graph.get_collection(tf.compat.v1.GraphKeys.GLOBAL_VARIABLES)
    named = [(*key_and_slice_of(variable), variable.shape) for variable in variables]
    for name, part, shape in named:
        if name in shapes and not part and not shape.is_compatible_with(shapes[name]):
            return f"{name} of shape {shape}", f"the shape {tf.TensorShape(shapes[name])}"
    missing = [f"{name} of shape {shape}" for name, _, shape in named if name not in shapes and reports_missing]
    return (missing[0], "no variable of that name") if missing else None


def find_checkpoint_damage(prefix: str) -> _CheckpointDamage | None:
    """Returns a `_CheckpointDamage`: the damaged file of a checkpoint, and the reason; None if no damage is found.

    The checkpoint of a folder that was intact is not read again as long as its files are the same.
    """
    folder, name = os.path.split(prefix)
    index = f"{prefix}.index"
    if not tf.io.gfile.exists(index):
        if tf.io.gfile.exists(prefix):
            return None  # a checkpoint of the first format, which TensorFlow can only read as a whole
        return _CheckpointDamage(index, "no such file")
    data_file = re.compile(rf"{re.escape(name)}\.data-\d+-of-\d+")
    data = [file for file in tf.io.gfile.listdir(folder or ".") if data_file.fullmatch(file)]
    files = _sizes_and_times(folder, [f"{name}.index", *sorted(data)])
    if files and _intact_files.get(folder) == files:
        return None
    damage = _read_checkpoint(prefix, data)
    if damage is None and files:
        _intact_files[folder] = files
    return damage


def _sizes_and_times(folder, files):
    """Returns (name, bytes, time in ns) for each file; an empty list if that cannot tell changed files from the same.

    So it is if a file was removed meanwhile, or is so new that a change could leave its time, in seconds, as it is.
    """
    try:
        found = [tf.io.gfile.stat(os.path.join(folder, file)) for file in files]
    except tf.errors.NotFoundError:
        return []
    if max(each.mtime_nsec for each in found) / 1e9 > time.time() - _LEAST_AGE_SECS:
        return []
    return [(file, each.length, each.mtime_nsec) for file, each in zip(files, found)]


def _read_checkpoint(prefix, data):
    """Reads a checkpoint whole; `data` lists its data files. Returns what `find_checkpoint_damage` returns."""
    try:
        reader = tf.train.load_checkpoint(prefix)
        names = reader.get_variable_to_shape_map()
    except tf.errors.NotFoundError:
        return None  # a reader expands the characters of patterns in a path; a session does not
    except tf.errors.OpError as error:
        return _CheckpointDamage(f"{prefix}.index", _first_line(error))
    folder, name = os.path.split(prefix)
    count = int(data[0].rpartition("-of-")[2]) if data else 1
    expected = [f"{name}.data-{number:05}-of-{count:05}" for number in range(count)]
    for file in expected:
        if file not in data:
            return _CheckpointDamage(os.path.join(folder, file), "no such file")
    for tensor in names:
        try:
            reader.get_tensor(tensor)
        except _UNREADABLE_DTYPES:
            continue
        except (tf.errors.OpError, IndexError) as error:
            file = os.path.join(folder, expected[0]) if count == 1 else f"{prefix}.data-*"
            return _CheckpointDamage(file, f"{tensor}, which cannot be read ({_first_line(error)})")
    return None


def add_copy_as_newest_checkpoint(folder: str, step: int, write_copy: Callable[[], str]) -> None:
    """Lists a copy as a folder's newest checkpoint, unless an intact one has this or a later step.

    Args:
      folder: folder of a job that may resume from an older checkpoint (`check_newest_checkpoint`).
      step: the step of the copy.
      write_copy: function that writes the copy, replaces a damaged checkpoint of this step, and returns the path. It is
        called only if the copy will be listed.
    """
    listed = _listed_checkpoints(folder) if tf.io.gfile.exists(os.path.join(folder, _STATE)) else []
    damage = None
    if listed and step <= _step_of(listed[-1]):
        damage = find_checkpoint_damage(listed[-1])
        if damage is None:
            return
    if damage is not None or (not listed and _has_lost_checkpoint_list(folder)):
        intact = _find_newest_intact_checkpoint(folder, listed[:-1])
        if intact is not None and step <= _step_of(intact):
            return
    path = write_copy()
    list_checkpoints(folder, [*(each for each in listed if _step_of(each) < step), path])
    if damage is not None:
        _LOG.warning("%s", _damage_message(damage, f"Training resumes from step {step}, which was kept in memory."))
    else:
        _LOG.info("Copied step %d from memory to %s.", step, folder)


def _listed_checkpoints(folder):
    """Returns the paths in the file `checkpoint`, the newest last; an empty list if the file cannot be read."""
    try:
        state = tf.train.get_checkpoint_state(folder)
    except ValueError:
        return []
    if state is None:
        return []
    newest = state.model_checkpoint_path
    return [*(path for path in state.all_model_checkpoint_paths if path != newest), newest]


def _find_newest_intact_checkpoint(folder, listed_paths):
    """Returns the path of the newest intact checkpoint, a listed one or one in the folder; None if all are damaged."""
    indexes = [file for file in tf.io.gfile.listdir(folder) if re.search(r"-\d+\.index$", file)]
    found = [os.path.join(folder, file[: -len(".index")]) for file in indexes]
    candidates = [*reversed(listed_paths), *sorted(found, key=_step_of, reverse=True)]
    return next((path for path in dict.fromkeys(candidates) if find_checkpoint_damage(path) is None), None)


def _has_lost_checkpoint_list(folder):
    """Returns whether this job has saved to the folder; if so, a missing file `checkpoint` has been lost."""
    began = float(read_variable(BEGAN) or "inf")
    files = tf.io.gfile.listdir(folder) if tf.io.gfile.isdir(folder) else ()
    indexes = [os.path.join(folder, file) for file in files if re.search(r"-\d+\.index$", file)]
    return any(tf.io.gfile.stat(path).mtime_nsec / 1e9 >= began for path in indexes)


def _step_of(prefix):
    number = re.search(r"-(\d+)$", prefix)
    return int(number.group(1)) if number else -1


def _shorten_listed_path(folder, path):
    return os.path.basename(path) if os.path.dirname(path) == folder.rstrip("/") else path


def list_checkpoints(folder: str, paths: Sequence[str]) -> None:
    """Writes the file `checkpoint` with these paths, the newest last; it stays valid if the folder is moved."""
    names = [json.dumps(_shorten_listed_path(folder, path), ensure_ascii=False) for path in paths]
    lines = [f"model_checkpoint_path: {names[-1]}", *(f"all_model_checkpoint_paths: {name}" for name in names)]
    path = os.path.join(folder, _STATE)
    write_checkpoint_list(path, "\n".join([*lines, ""]))


def _damage_message(damage, fix):
    # Paths are never shortened: the reader has to type them.
    got = shortened(damage.reason, _LONGEST_REASON)
    return f"checkpoint: {damage.file} is damaged. Expected a file as it was saved; got {got}. {fix}"


def _restore_hint(folder, intact):
    state = os.path.join(folder, _STATE)
    if intact is None:
        return f"No intact checkpoint is left in {folder}; remove {state} to start from initial values."
    path = _shorten_listed_path(folder, intact)
    line = f'model_checkpoint_path: "{path}"'
    return f"The newest intact checkpoint is {path}; to resume from it, write {line} to {state}."


def _first_line(error):
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200].rstrip(".")
