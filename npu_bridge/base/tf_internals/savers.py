"""Wraps private parts of savers, checkpoints and event files. Seen in TensorFlow 2.15.1, Estimator 2.15.0."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable

from npu_bridge.base.after_import import wrap_function

if TYPE_CHECKING:
    import tensorflow as tf


def track_part(owner: Any, part: Any, name: str, overwrite: bool = False) -> None:
    """Makes an object part of another object's checkpoints (`Trackable._track_trackable`, TF 2.15)."""
    owner._track_trackable(part, name, overwrite=overwrite)


def delegating_trackable_class() -> type:
    """Returns a class whose objects another object replaces in checkpoints (`tf.__internal__.tracking`, TF 2.15)."""
    import tensorflow as tf

    return tf.__internal__.tracking.DelegatingTrackableMixin


def bulk_saver_builder() -> type:
    """Returns the class that builds the operators of a saver (`training.saver.BulkSaverBuilder`, TF 2.15)."""
    from tensorflow.python.training.saver import BulkSaverBuilder

    return BulkSaverBuilder


def folder_of_saver_hook(hook: tf.estimator.CheckpointSaverHook) -> str:
    """Returns the folder that a hook saves to (`CheckpointSaverHook._checkpoint_dir`, TF 2.15)."""
    return hook._checkpoint_dir


def listeners_of(hook: tf.estimator.CheckpointSaverHook) -> list:
    """Returns the listeners of a checkpoint hook (`CheckpointSaverHook._listeners`, TF 2.15)."""
    return hook._listeners


def set_steps_per_run(hook: tf.estimator.CheckpointSaverHook, steps: int) -> None:
    """Sets the number of steps per run of a hook (`CheckpointSaverHook._set_steps_per_run`, Estimator 2.15)."""
    hook._set_steps_per_run(steps)


def wrap_restore(function: Callable) -> None:
    """Makes TF 1 `Saver.restore` call `function(restore, saver, session, path)` (`training.saver`, TF 2.15)."""
    from tensorflow.python.training.saver import Saver

    wrap_function(Saver, "restore", lambda restore, saver, sess, save_path: function(restore, saver, sess, save_path))


def key_and_slice_of(variable: tf.Variable) -> tuple[str, str]:
    """Returns the checkpoint key and slice of a variable in TF 1 savers (`_save_slice_info`, TF 2.15)."""
    part = getattr(variable, "_save_slice_info", None)
    return (part.full_name, part.spec) if part is not None else (variable.name.partition(":")[0], "")


def variables_by_key(saver: tf.compat.v1.train.Saver) -> dict | None:
    """Returns a saver's dictionary of variables; None if it was made without one (`_var_list`, TF 2.15)."""
    given = saver._var_list
    return given if isinstance(given, dict) else None


def keys_in_object_checkpoint(reader: Any) -> dict[str, str]:
    """Returns the keys of an object-based checkpoint by variable name; empty for another kind of checkpoint.

    Checked in TF 2.15: the message `TrackableObjectGraph` under the key `_CHECKPOINTABLE_OBJECT_GRAPH`.
    """
    from tensorflow.core.protobuf import trackable_object_graph_pb2

    key = "_CHECKPOINTABLE_OBJECT_GRAPH"
    if not reader.has_tensor(key):
        return {}
    objects = trackable_object_graph_pb2.TrackableObjectGraph.FromString(reader.get_tensor(key))
    parts = [part for node in objects.nodes for part in node.attributes]
    return {part.full_name: part.checkpoint_key for part in parts if part.full_name}


def is_restored(part: Any) -> bool:
    """Returns whether an object was restored from an object-based checkpoint (`Trackable._update_uid`, TF 2.15)."""
    return getattr(part, "_self_update_uid", -1) >= 0


def names_restored_but_unused(part: Any) -> list[str]:
    """Returns the names of restored parts that an object has not created yet (`_deferred_dependencies`)."""
    waiting = getattr(part, "_self_unconditional_deferred_dependencies", None) or {}  # seen in TF 2.15
    return [name for name, restores in waiting.items() if restores]


def shared_event_writer(folder: str) -> Any:
    """Returns the cached writer of `FileWriterCache.get` for a folder, or None (`FileWriterCache._cache`, TF 2.15)."""
    import tensorflow as tf

    cache = tf.compat.v1.summary.FileWriterCache
    with cache._lock:
        return cache._cache.get(folder)


def share_event_writer(folder: str, writer: Any) -> None:
    """Makes `FileWriterCache.get`, and so TensorFlow's hooks, use a writer (`FileWriterCache._cache`, TF 2.15)."""
    import tensorflow as tf

    cache = tf.compat.v1.summary.FileWriterCache
    with cache._lock:
        cache._cache[folder] = writer
