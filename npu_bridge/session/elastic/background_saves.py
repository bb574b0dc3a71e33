"""Saves checkpoints in the background: copies variables to memory, and from there to the disk in a thread."""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any, Callable

import tensorflow as tf

from npu_bridge.base.held_folders import Hold
from npu_bridge.base.memory_folders import folder_of_job
from npu_bridge.base.tf_internals.sessions import session_interface
from npu_bridge.session.checkpoints import CarefulSaver, copy_checkpoint, write_beside
from npu_bridge.session.elastic.memory_checkpoints import MemoryCheckpoints


class BackgroundWriter:
    """A thread that writes copies in memory to the disk, one at a time."""

    def __init__(self):
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def start(self, copies: MemoryCheckpoints, path: str, write: Callable[[], object]) -> None:
        """Begins to write; the copy stays until this is done.

        Args:
          copies: the copies of the training.
          path: path of the copy to write.
          write: writes it to the disk.
        """
        in_use = contextlib.ExitStack()
        in_use.enter_context(copies.used(path))  # here already, as the thread can start later
        self._thread = threading.Thread(target=self._run, args=(copies, in_use, write), name="npu_bridge checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Waits until the copy is on the disk; raises the error of the thread."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        self.check()

    def check(self) -> None:
        """Raises an error of the thread, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, copies, in_use, write):
        try:
            with in_use:
                write()
        except Exception as error:  # is raised by `check`, in the thread that trains
            self._error = error
        if folder_of_job() is None:  # no restart would use them
            copies.forget()


class BackgroundSaver:
    """A saver like `CarefulSaver` that saves during the training.

    It saves the state at the time of `save`. A save waits for the one before. An older checkpoint is removed once the
    new one is on the disk and has been read back.

    Args:
      copies: copies in memory; with None, or too little memory, the training waits for the disk.
      hold: the hold on the folder of the checkpoints.
    Attributes:
      waits: whether `save` returns only when everything is on the disk.
    """

    def __init__(self, copies: MemoryCheckpoints | None, hold: Hold | None = None):
        self._copies, self._hold = copies, hold
        self._writer = BackgroundWriter()
        self._meta_graph: tuple[int, bytes] | None = None
        self.waits = True

    def of(self, saver: Any) -> BackgroundSaver:
        """Sets the `tf.compat.v1.train.Saver` to save with, which counts its checkpoints."""
        self._saver, self.saver_def = saver, saver.saver_def
        return self

    def save(self, session: Any, save_path: str, global_step: int, write_meta_graph: bool = True) -> None:
        """Saves variables as `tf.compat.v1.train.Saver.save`, or begins to.

        Raises:
          CheckpointNotSavedError: there is no space, for this save or the one before.
          FolderHeldError: another job has taken over the folder.
        """
        try:
            self.wait()
        finally:  # the error of the save before is raised after this save has begun
            if not self._begin(session, save_path, global_step, write_meta_graph):
                CarefulSaver(self._saver, self._hold).save(session, save_path, global_step, write_meta_graph)
        if self.waits:
            self.wait()

    def wait(self) -> None:
        """Waits until the checkpoint is on the disk; raises the error of the save."""
        self._writer.wait()

    def check(self) -> None:
        """Raises an error of a save in the background, once."""
        self._writer.check()

    def _begin(self, session, save_path, global_step, write_meta_graph):
        """Copies the variables to memory, and starts the thread; returns False if this is not possible."""
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
        write = functools.partial(self._write, saver, copying, save_path, global_step, write_meta_graph)
        self._writer.start(self._copies, path, write)
        return True

    def _write(self, saver, copying, save_path, global_step, write_meta_graph):
        graph, careful = copying.graph, CarefulSaver(saver, self._hold)
        # Making the file of a graph takes longer than writing it, and blocks Python.
        is_new = self._meta_graph is None or self._meta_graph[0] != graph.version
        with graph.as_default():  # this thread has no default graph
            prefix = careful.save(copying, save_path, global_step, write_meta_graph and is_new)
        if write_meta_graph and is_new:
            with tf.io.gfile.GFile(f"{prefix}.meta", "rb") as file:
                self._meta_graph = graph.version, file.read()
        elif write_meta_graph:
            write_beside(f"{prefix}.meta", self._meta_graph[1])


class _CopyingSession(session_interface()):  # type: ignore[misc]  # a class of TensorFlow, looked up
    """A session for a saver, in which the save operator copies an existing checkpoint."""

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
    """Computes the bytes of a graph's variables, without those of unknown shape."""
    variables = graph.get_collection(tf.compat.v1.GraphKeys.GLOBAL_VARIABLES)
    sizes = [(variable.shape.num_elements() or 0) * variable.dtype.base_dtype.size for variable in variables]
    return sum(sizes)
