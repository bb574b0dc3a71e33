"""Writes TensorBoard's event files, with one writer for all hooks of a folder. Write errors never end a training."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from npu_bridge.base.files import check_free_space
from npu_bridge.base.secondary_files import NonFatalOutput
from npu_bridge.base.tf_internals.savers import share_event_writer, shared_event_writer


class EventFiles:
    """A writer with the methods of `tf.compat.v1.summary.FileWriter`; it drops entries that cannot be written.

    TensorFlow's own writer has a thread, which ends with a traceback when the disk is full. The next entry then raises
    the thread's error in the middle of a training, and later entries are dropped silently. `EventFiles` first checks
    the free space of the disk, flushes every entry, and replaces a TensorFlow writer that has failed.

    Args:
      folder: folder of the event files, on a local file system.
    """

    def __init__(self, folder: str):
        self._folder = folder
        self._writer: Any = None
        self._owner: Any = None
        self._owned: frozenset[str] = frozenset()
        self._secondary = NonFatalOutput(f"the file of events in {folder}", (RuntimeError, tf.errors.OpError))

    @classmethod
    def of(cls, folder: str) -> Any:
        """Returns the writer of a folder, shared with TensorFlow's hooks; for a remote folder, TensorFlow's writer."""
        if "://" in folder:
            with tf.Graph().as_default():  # eager code has no such writer
                return tf.compat.v1.summary.FileWriterCache.get(folder)
        shared = shared_event_writer(folder)
        if isinstance(shared, cls):
            return shared
        if shared is not None:
            shared.flush()
        own = cls(folder)
        share_event_writer(folder, own)
        return own

    def open_with_graph(self, graph: tf.Graph) -> None:
        """Unless the file is open, opens it with a graph as the first entry, as TensorFlow's own writer does."""
        if self._writer is None:
            self._secondary.attempt(self._open, graph)

    def reserve_tags(self, owner: Any, tags: Iterable[str]) -> None:
        """Reserves `tags` for one owner from now on: summaries of other owners with these tags are dropped."""
        self._owner, self._owned = owner, frozenset(tags)

    def release_tags(self, owner: Any) -> None:
        """Ends the reservation of an owner's tags."""
        if owner is self._owner:
            self.reserve_tags(None, ())

    def add_unless_reserved(self, owner: Any, entries: Iterable[tuple[tf.compat.v1.Summary, int]]) -> bool:
        """Adds (summary, step) pairs, unless another owner has reserved tags; returns False if writing failed."""
        return self._owner not in (None, owner) or self._try_to_call_writer("add_summary", *entries)

    def add_summary(self, summary: Any, global_step: int | None = None) -> None:
        """Adds a summary, given as a message or as bytes."""
        if self._owned:
            given = summary if isinstance(summary, bytes) else summary.SerializeToString()
            summary = tf.compat.v1.Summary.FromString(given)
            kept = [value for value in summary.value if value.tag not in self._owned]
            if not kept:
                return
            summary = tf.compat.v1.Summary(value=kept)
        self._try_to_call_writer("add_summary", (summary, global_step))

    def __getattr__(self, name: str) -> Any:
        """Returns the other methods that add entries, such as `add_graph`."""
        if not name.startswith("add_"):
            raise AttributeError(f"a writer of event files has no {name!r}")
        return lambda *arguments, **keywords: self._try_to_call_writer(name, arguments, **keywords)

    def get_logdir(self) -> str:
        """Returns the folder."""
        return self._folder

    def reopen(self) -> None:
        """Does nothing: the next entry opens the file."""

    def flush(self) -> None:
        """Does nothing: every entry is flushed when it is added."""

    def close(self) -> None:
        """Closes the file; the next entry opens a new one."""
        if self._writer is not None:
            self._secondary.attempt(self._writer.close, is_last_chance=True)
            self._writer = None

    def _try_to_call_writer(self, method: str, *calls: tuple, **keywords: Any) -> bool:
        return self._secondary.attempt(functools.partial(self._call_writer, method, *calls, **keywords))

    def _call_writer(self, method: str, *calls: tuple, **keywords: Any) -> None:
        check_free_space(self._folder)
        if self._writer is None:
            self._open()
        try:
            for arguments in calls:
                getattr(self._writer, method)(*arguments, **keywords)
            self._writer.flush()
        except Exception:
            self._writer = None  # the writer's thread has ended
            raise

    def _open(self, graph: tf.Graph | None = None) -> None:
        check_free_space(self._folder)
        with tf.Graph().as_default():  # eager code has no such writer
            self._writer = tf.compat.v1.summary.FileWriter(self._folder, graph)


class BeginEventsHook(tf.estimator.SessionRunHook):
    """A hook that begins the event file of a folder with the graph; must precede hooks that write to the file."""

    def __init__(self, folder: str):
        self._folder = folder

    def begin(self):
        events = EventFiles.of(self._folder)
        if isinstance(events, EventFiles):
            events.open_with_graph(tf.compat.v1.get_default_graph())
