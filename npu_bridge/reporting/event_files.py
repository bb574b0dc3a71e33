"""The writer of TensorBoard's event files that all hooks of a folder share, and that ends no training."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from npu_bridge.base.files import check_room
from npu_bridge.base.secondary_files import Secondary
from npu_bridge.base.tf_internals.training import share_event_writer, shared_event_writer

__all__ = ["BeginEventsHook", "EventFiles"]


class EventFiles:
    """Has the methods of `tf.compat.v1.summary.FileWriter`; what cannot be written is left out.

    TensorFlow's own writer has a thread, which ends with a traceback when a disk is full: who writes next gets its
    error, in the middle of a training, and whatever comes then is dropped without a word. Here room is tried before
    anything is handed to it, everything is written at once, and one that has failed is replaced.

    Args:
      folder: of the event files, on a file system of this machine.
    """

    def __init__(self, folder: str):
        self._folder = folder
        self._writer: Any = None
        self._owner: Any = None
        self._owned: frozenset[str] = frozenset()
        self._secondary = Secondary(f"the file of events in {folder}", (RuntimeError, tf.errors.OpError))

    @classmethod
    def of(cls, folder: str) -> Any:
        """The one of a folder, which TensorFlow's hooks then get, too; of a remote one, TensorFlow's writer."""
        if "://" in folder:
            with tf.Graph().as_default():  # in eager code there is no such writer
                return tf.compat.v1.summary.FileWriterCache.get(folder)
        shared = shared_event_writer(folder)
        if isinstance(shared, cls):
            return shared
        if shared is not None:
            shared.flush()
        own = cls(folder)
        share_event_writer(folder, own)
        return own

    def begin_with(self, graph: tf.Graph) -> None:
        """Opens the file with a graph, as TensorFlow's own writer does, unless it has been opened."""
        if self._writer is None:
            self._secondary.attempt(self._open, graph)

    def own(self, owner: Any, tags: Iterable[str]) -> None:
        """From now on summaries with these tags come from one owner alone; those of others are left out."""
        self._owner, self._owned = owner, frozenset(tags)

    def give_up(self, owner: Any) -> None:
        """Ends that."""
        if owner is self._owner:
            self.own(None, ())

    def add_own(self, owner: Any, entries: Iterable[tuple[tf.compat.v1.Summary, int]]) -> bool:
        """Adds summaries, each with its step, in one go; gives whether they are in the file, or need not be."""
        return self._owner not in (None, owner) or self._attempt("add_summary", *entries)

    def add_summary(self, summary: Any, global_step: int | None = None) -> None:
        """Adds a summary, as a message or as bytes."""
        if self._owned:
            given = summary if isinstance(summary, bytes) else summary.SerializeToString()
            summary = tf.compat.v1.Summary.FromString(given)
            kept = [value for value in summary.value if value.tag not in self._owned]
            if not kept:
                return
            summary = tf.compat.v1.Summary(value=kept)
        self._attempt("add_summary", (summary, global_step))

    def __getattr__(self, name: str) -> Any:
        """`add_graph` and so on."""
        if not name.startswith("add_"):
            raise AttributeError(f"a writer of event files has no {name!r}")
        return lambda *arguments, **keywords: self._attempt(name, arguments, **keywords)

    def get_logdir(self) -> str:
        """The folder."""
        return self._folder

    def reopen(self) -> None:
        """Nothing is to be done: the next entry opens it."""

    def flush(self) -> None:
        """Nothing is to be done: every entry is in the file when the method that adds it returns."""

    def close(self) -> None:
        """Closes the file; another entry would go to a new one."""
        if self._writer is not None:
            self._secondary.attempt(self._writer.close, now=True)
            self._writer = None

    def _attempt(self, name: str, *calls: tuple, **keywords: Any) -> bool:
        return self._secondary.attempt(functools.partial(self._add, name, *calls, **keywords))

    def _add(self, name: str, *calls: tuple, **keywords: Any) -> None:
        check_room(self._folder)
        if self._writer is None:
            self._open()
        try:
            for arguments in calls:
                getattr(self._writer, name)(*arguments, **keywords)
            self._writer.flush()
        except Exception:
            self._writer = None  # its thread has ended
            raise

    def _open(self, graph: tf.Graph | None = None) -> None:
        check_room(self._folder)
        with tf.Graph().as_default():  # in eager code there is no such writer
            self._writer = tf.compat.v1.summary.FileWriter(self._folder, graph)


class BeginEventsHook(tf.estimator.SessionRunHook):
    """Begins the file of events of a folder with the graph; to be first among hooks, which then write to it."""

    def __init__(self, folder: str):
        self._folder = folder

    def begin(self):
        events = EventFiles.of(self._folder)
        if isinstance(events, EventFiles):
            events.begin_with(tf.compat.v1.get_default_graph())
