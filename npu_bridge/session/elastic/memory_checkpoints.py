"""Keeps a copy of a training's newest state in a folder in memory, and decides how often to copy (0.5 % of the time).

A restarted job resumes from this copy if it is newer than the checkpoint on the disk. A save in the background writes
this copy to the disk.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import hashlib
import math
import os
import statistics
import threading
import time
from collections.abc import Iterator
from typing import Callable

import numpy as np
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base.files import UNFINISHED, remove_own_files, rename_unfinished
from npu_bridge.base.machine import available_memory_bytes
from npu_bridge.base.memory_folders import MemoryFolder, folder_of_job, free_bytes, make_memory_folder
from npu_bridge.base.terminal import logger
from npu_bridge.collective.apart import SeparateGraph
from npu_bridge.session.checkpoints import NO_SPACE, copy_checkpoint
from npu_bridge.session.damaged_checkpoints import add_copy_as_newest_checkpoint

_LOG = logger(__name__)
_NAME = "model.ckpt"
# Free memory needed, as a multiple of a copy's size: the old copy, the new copy, and as much again for other uses.
_TIMES_FREE = 3
# Share of a training's time for copies. A checkpoint costs as much again, and the sum is to stay below 1 %.
_SHARE = 0.005
_FIRST_AFTER_RUNS = 10


class CopyInterval:
    """Decides after how many runs the next copy is due, so that copies take 0.5 % of the time.

    Ranks: collective; all ranks use the measurements of rank 0.
    """

    def __init__(self):
        ranks = collective.current()
        self._agreed = SeparateGraph(lambda own: ranks.broadcast(own, 0, "memory_checkpoint_runs"), np.int64(0))
        self._costs: collections.deque[float] = collections.deque(maxlen=3)  # the first copy builds an executor
        self.runs = _FIRST_AFTER_RUNS
        self.begin()

    def begin(self) -> None:
        """Starts to count runs and time."""
        self._made, self._since = 0, time.monotonic()

    def count_run_and_check_due(self) -> bool:
        """Counts a run; returns whether a copy is due after this run."""
        self._made += 1
        return self._made >= self.runs

    @contextlib.contextmanager
    def measured_copy(self) -> Iterator[None]:
        """Measures the time of a block that makes a copy, and sets the number of runs until the next copy."""
        began = time.monotonic()
        secs_per_run = (began - self._since) / self._made
        yield
        self.begin()
        self._costs.append(self._since - began)
        cost = statistics.median(self._costs)
        self.runs = int(self._agreed.run(np.int64(max(1, math.ceil(cost / (_SHARE * secs_per_run))))))

    def close(self) -> None:
        """Closes the session in which the ranks agree on the interval."""
        self._agreed.close()


class MemoryCheckpoints:
    """The copies of one training's state in the memory of this machine. Only the newest copy is kept.

    Args:
      folder: folder of the copies, created with the first copy.
    Attributes:
      writer: the thread that copies to the disk, or the last one that did.
    """

    def __init__(self, folder: str):
        self._folder = folder
        self.writer: threading.Thread | None = None
        self._in_use: set[str] = set()

    def write(self, save: Callable[[str], object], step: int, size_bytes: int) -> str | None:
        """Writes a copy, and removes older ones.

        Args:
          save: function that writes a checkpoint to a given path.
          step: the global step.
          size_bytes: expected size of the checkpoint.
        Returns:
          The path of the checkpoint; None if there is too little memory.
        """
        own = os.getpid()
        place, unfinished = (os.path.join(self._folder, name) for name in (f"{step}-{own}", f"{UNFINISHED}{own}"))
        path = os.path.join(place, _NAME)
        if place in self._in_use:  # the same step, which is being copied to the disk
            return path
        try:
            os.makedirs(self._folder, 0o700, exist_ok=True)
            if min(free_bytes(self._folder), available_memory_bytes()) < _TIMES_FREE * size_bytes:
                return None
            _remove_copy(unfinished)
            os.mkdir(unfinished)
            save(os.path.join(unfinished, _NAME))
            _remove_copy(place)
            rename_unfinished(unfinished, place)
        except (OSError, *NO_SPACE):
            with contextlib.suppress(OSError):
                _remove_copy(unfinished)
            return None
        self._remove_copies_if(lambda number, process: process == own or 0 <= number < step, kept_folder=place)
        return path

    def find_newest(self) -> tuple[int, str] | None:
        """Returns the global step and the path of the newest copy that another process of this job has made."""
        found = []
        with contextlib.suppress(OSError):
            for name in os.listdir(self._folder):
                step, _, process = name.partition("-")
                if step.isdecimal() and process != str(os.getpid()):
                    found.append((int(step), os.path.join(self._folder, name, _NAME)))
        return max(found, default=None)

    @contextlib.contextmanager
    def keep_copy_during_block(self, path: str) -> Iterator[None]:
        """Keeps a copy for the duration of a block, even if a newer copy is written."""
        place = os.path.dirname(path)
        self._in_use.add(place)
        try:
            yield
        finally:
            self._in_use.discard(place)

    def remove_copies(self) -> None:
        """Removes the copies of this process and of processes that have ended; called at the end of a training."""
        self._remove_copies_if(lambda step, process: process == os.getpid() or not os.path.exists(f"/proc/{process}"))
        with contextlib.suppress(OSError):
            if not os.listdir(self._folder):
                _remove_copy(self._folder)

    def _remove_copies_if(self, is_outdated, kept_folder=""):
        """Removes each copy for which `is_outdated(step, process)` is True, except the folder `kept_folder`."""
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self._folder):
                place, (step, _, process) = os.path.join(self._folder, name), name.rpartition("-")
                step_number = int(step) if step.isdecimal() else -1  # -1: unfinished
                if place != kept_folder and place not in self._in_use and is_outdated(step_number, int(process)):
                    _remove_copy(place)


def memory_checkpoints(model_dir: str, only_of_job: bool = False) -> MemoryCheckpoints | None:
    """Returns the `MemoryCheckpoints` of a training; None if there is no folder in memory.

    The folder is the job's memory folder, else a memory folder of this process. A training that has ended with an error
    can still be copying its state to the disk: the next one in the same `model_dir` waits here until that is done.

    Args:
      model_dir: folder of the checkpoints on the disk.
      only_of_job: whether to return None if the job has no memory folder.
    """
    root = folder_of_job()
    if root is None and not only_of_job:
        own = _memory_folder_of_process()
        root = own and own.path
    if root is None:
        return None
    real = model_dir if "://" in model_dir else os.path.realpath(model_dir)
    copies = _memory_checkpoints_in(os.path.join(root, hashlib.sha256(os.fsencode(real)).hexdigest()[:16]))
    if copies.writer is not None and copies.writer.is_alive():
        copies.writer.join()
    return copies


def take_memory_checkpoint(model_dir: str | None) -> None:
    """Copies to the disk the state that an earlier start of this job left in memory, if the latest checkpoint is older.

    A damaged checkpoint on the disk is ignored.

    Ranks: local; does nothing on ranks other than 0.
    """
    if not model_dir or folder_of_job() is None or collective.current().rank > 0:
        return
    copies = memory_checkpoints(model_dir, only_of_job=True)
    found = copies and copies.find_newest()
    if not found:
        return
    step, path = found

    def copy() -> str:
        target = os.path.join(model_dir, f"{_NAME}-{step}")
        tf.io.gfile.makedirs(model_dir)
        copy_checkpoint(path, target)
        return target

    try:
        add_copy_as_newest_checkpoint(model_dir, step, copy)
    except tf.errors.OpError as error:
        _LOG.warning(
            "The copy of step %d in memory is not used, because writing it to a checkpoint failed (%s).",
            step,
            error.message,
        )


@functools.cache
def _memory_folder_of_process() -> MemoryFolder | None:
    folder = make_memory_folder()
    if folder is not None:
        atexit.register(folder.close)
    return folder


@functools.cache
def _memory_checkpoints_in(folder: str) -> MemoryCheckpoints:
    return MemoryCheckpoints(folder)


def _remove_copy(place: str) -> None:
    remove_own_files(place, lambda path, found: os.path.basename(path).startswith(_NAME))
