"""Saves checkpoints in the background: variables go to memory at once, and from there to the disk in a thread."""

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

__all__ = ["BackgroundSaver", "BackgroundWriter", "size_of_variables"]


class BackgroundWriter:
    """Writes copies in memory to the disk in a thread, one at a time."""

    def __init__(self):
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def start(self, copies: MemoryCheckpoints, path: str, write: Callable[[], object]) -> None:
        """Begins to write; the copy stays until that is done.

        Args:
          copies: those of the training.
          path: of the one that is written.
          write: writes it to the disk.
        """
        in_use = contextlib.ExitStack()
        in_use.enter_context(copies.used(path))  # from now on, and not only when the thread runs
        self._thread = threading.Thread(target=self._run, args=(copies, in_use, write), name="npu_bridge checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Waits until what was begun is on the disk; raises what that has raised."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        self.check()

    def check(self) -> None:
        """Raises what writing in the background has raised, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, copies, in_use, write):
        try:
            with in_use:
                write()
        except Exception as error:  # is raised by `check`, in the thread that trains
            self._error = error
        if folder_of_job() is None:  # nobody goes on from there
            copies.forget()


class BackgroundSaver:
    """Saves as `CarefulSaver`, while the training goes on.

    What is saved is the state at the time of `save`. There is one save at a time: the next one waits for the one
    before. An older checkpoint is removed when the new one is on the disk and was read back from there.

    Args:
      copies: where state is kept in memory meanwhile; None, or too little memory, makes the training wait.
      hold: on the folder of the checkpoints.
    Attributes:
      waits: `save` returns when everything is on the disk.
    """

    def __init__(self, copies: MemoryCheckpoints | None, hold: Hold | None = None):
        self._copies, self._hold = copies, hold
        self._writer = BackgroundWriter()
        self._meta_graph: tuple[int, bytes] | None = None
        self.waits = True

    def of(self, saver: Any) -> BackgroundSaver:
        """Saves by this `tf.compat.v1.train.Saver` from now on, which keeps count of its checkpoints."""
        self._saver, self.saver_def = saver, saver.saver_def
        return self

    def save(self, session: Any, save_path: str, global_step: int, write_meta_graph: bool = True) -> None:
        """Saves variables as `tf.compat.v1.train.Saver.save`, or begins to.

        Raises:
          CheckpointNotSavedError: there is no space; perhaps there was none for the save before.
          FolderHeldError: another job has taken the folder over.
        """
        try:
            self.wait()
        finally:  # what the save before has raised is raised behind this one
            if not self._begin(session, save_path, global_step, write_meta_graph):
                CarefulSaver(self._saver, self._hold).save(session, save_path, global_step, write_meta_graph)
        if self.waits:
            self.wait()

    def wait(self) -> None:
        """Waits until what was begun is on the disk; raises what that has raised."""
        self._writer.wait()

    def check(self) -> None:
        """Raises what a save in the background has raised, once."""
        self._writer.check()

    def _begin(self, session, save_path, global_step, write_meta_graph):
        """Copies the variables to memory, and starts the thread; False where that is not possible."""
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
        # Making the file of a graph takes longer than writing it, and holds Python back.
        is_new = self._meta_graph is None or self._meta_graph[0] != graph.version
        with graph.as_default():  # this thread has none of its own
            prefix = careful.save(copying, save_path, global_step, write_meta_graph and is_new)
        if write_meta_graph and is_new:
            with tf.io.gfile.GFile(f"{prefix}.meta", "rb") as file:
                self._meta_graph = graph.version, file.read()
        elif write_meta_graph:
            write_beside(f"{prefix}.meta", self._meta_graph[1])


class _CopyingSession(session_interface()):  # type: ignore[misc]  # a class of TensorFlow, looked up
    """What a saver takes for a session: its save operator copies a checkpoint that is there already."""

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
    """How many bytes the variables of a graph take, less those whose shape is not known."""
    variables = graph.get_collection(tf.compat.v1.GraphKeys.GLOBAL_VARIABLES)
    sizes = [(variable.shape.num_elements() or 0) * variable.dtype.base_dtype.size for variable in variables]
    return sum(sizes)
