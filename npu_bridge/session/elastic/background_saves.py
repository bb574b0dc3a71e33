"""Saves checkpoints in the background: copies variables to memory, and lets a thread copy them to the disk."""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any, Callable

import tensorflow as tf

from npu_bridge.base.held_folders import FolderHold
from npu_bridge.base.memory_folders import folder_of_job
from npu_bridge.base.tf_internals.sessions import session_interface
from npu_bridge.session.checkpoints import CarefulSaver, copy_checkpoint, write_checkpoint_file
from npu_bridge.session.elastic.memory_checkpoints import MemoryCheckpoints


class BackgroundWriter:
    """Writes copies from memory to the disk in a thread, one copy at a time."""

    def __init__(self):
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def start(self, copies: MemoryCheckpoints, path: str, write: Callable[[], object]) -> None:
        """Starts a thread that writes a copy to the disk; the copy stays in memory until it is written.

        Args:
          copies: the copies of the training in memory.
          path: path of the copy to write.
          write: function that writes the copy to the disk.
        """
        in_use = contextlib.ExitStack()
        in_use.enter_context(copies.keep_copy_during_block(path))  # entered here, as the thread can start later
        copies.writer = self._thread = threading.Thread(
            target=self._write_in_thread, args=(copies, in_use, write), name="npu_bridge checkpoint"
        )
        self._thread.start()

    def wait(self) -> None:
        """Waits until the copy is on the disk; raises the thread's error if writing failed."""
        if self._thread is not None:
            self._thread.join()  # Ctrl-C can end this; a later call then waits for the same thread
        self._thread = None
        self.raise_write_error()

    def raise_write_error(self) -> None:
        """Raises the thread's error if writing has failed; a second call does not raise the error again."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _write_in_thread(self, copies, in_use, write):
        try:
            with in_use:
                write()
        except Exception as error:  # is raised by `raise_write_error`, in the thread that trains
            self._error = error
        if folder_of_job() is None:  # no restart would use them
            copies.remove_copies()


class BackgroundSaver:
    """A saver like `CarefulSaver` that saves in the background while the training continues.

    A checkpoint holds the state at the time of `save`. A call of `save` waits until the previous checkpoint is on the
    disk. An older checkpoint is removed once the new one is on the disk and has been read back.

    Args:
      copies: the copies in memory. If this is None, or memory is short, the training waits for the disk.
      hold: the hold on the folder of the checkpoints.
    Attributes:
      waits: whether `save` returns only when the checkpoint is on the disk.
    """

    def __init__(self, copies: MemoryCheckpoints | None, hold: FolderHold | None = None):
        self._copies, self._hold = copies, hold
        self._writer = BackgroundWriter()
        self._meta_graph: tuple[int, bytes] | None = None
        self.waits = True

    def use_saver(self, saver: Any) -> BackgroundSaver:
        """Sets the `tf.compat.v1.train.Saver` that saves and keeps the list of checkpoints; returns `self`."""
        self._saver, self.saver_def = saver, saver.saver_def
        return self

    def save(self, session: Any, save_path: str, global_step: int, write_meta_graph: bool = True) -> None:
        """Saves variables as `tf.compat.v1.train.Saver.save` does; in the background if memory allows.

        Raises:
          CheckpointNotSavedError: the disk has no space for this checkpoint, or had none for the previous one.
          FolderHeldError: another job has taken over the folder.
        """
        previous_error = None
        try:
            self.wait()
        except Exception as error:  # is raised after this save has begun; Ctrl-C begins no save
            previous_error = error
        if not self._begin_background_save(session, save_path, global_step, write_meta_graph):
            CarefulSaver(self._saver, self._hold).save(session, save_path, global_step, write_meta_graph)
        if previous_error is not None:
            raise previous_error
        if self.waits:
            self.wait()

    def wait(self) -> None:
        """Waits until the checkpoint is on the disk; raises the error if saving failed."""
        self._writer.wait()

    def raise_write_error(self) -> None:
        """Raises the error if a save in the background has failed; a second call does not raise the error again."""
        self._writer.raise_write_error()

    def _begin_background_save(self, session, save_path, global_step, write_meta_graph):
        """Copies variables to memory and starts the thread that writes them; returns False if this is not possible."""
        names, saver = self.saver_def, self._saver
        is_plain = type(saver).save is tf.compat.v1.train.Saver.save and names.version == names.V2
        if self._copies is None or not is_plain:
            return False
        path = self._copies.write(
            lambda path: session.run(names.save_tensor_name, {names.filename_tensor_name: path}),
            global_step,
            size_of_variables(session.graph),
        )
        if path is None:
            return False
        copying = _CopyingSession(session.graph, path)
        write = functools.partial(self._write_to_disk, saver, copying, save_path, global_step, write_meta_graph)
        self._writer.start(self._copies, path, write)
        return True

    def _write_to_disk(self, saver, copying, save_path, global_step, write_meta_graph):
        graph, careful = copying.graph, CarefulSaver(saver, self._hold)
        # Making the file of a graph takes longer than writing it, and blocks Python.
        is_new = self._meta_graph is None or self._meta_graph[0] != graph.version
        with graph.as_default():  # this thread has no default graph
            prefix = careful.save(copying, save_path, global_step, write_meta_graph and is_new)
        if write_meta_graph and is_new:
            with tf.io.gfile.GFile(f"{prefix}.meta", "rb") as file:
                self._meta_graph = graph.version, file.read()
        elif write_meta_graph:
            write_checkpoint_file(f"{prefix}.meta", self._meta_graph[1])


class _CopyingSession(session_interface()):  # type: ignore[misc]  # a class of TensorFlow, looked up
    """A stand-in for a saver's session: its `run` copies an existing checkpoint instead of saving variables."""

    def __init__(self, graph: tf.Graph, path: str):
        self._graph, self._path = graph, path

    @property
    def graph(self):
        return self._graph

    def run(self, fetches, feed_dict=None, options=None, run_metadata=None):
        (target,) = feed_dict.values()
        copy_checkpoint(self._path, target)
        return target


def size_of_variables(graph: tf.Graph) -> int:
    """Returns the size of a graph's variables in bytes; variables of unknown shape do not count."""
    variables = graph.get_collection(tf.compat.v1.GraphKeys.GLOBAL_VARIABLES)
    sizes = [(variable.shape.num_elements() or 0) * variable.dtype.base_dtype.size for variable in variables]
    return sum(sizes)
