"""Keeps the newest state of a training in a folder in memory, which outlives its process.

A restarted job resumes from there if this copy is newer than the checkpoint on the disk. Saves in the background copy
from there to the disk.
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
import time
from collections.abc import Iterator
from typing import Callable

import numpy as np
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base.files import UNFINISHED, put_in_place, remove_own
from npu_bridge.base.memory_folders import MemoryFolder, folder_of_job, free_bytes, make_memory_folder
from npu_bridge.base.terminal import logger
from npu_bridge.collective.apart import GraphApart
from npu_bridge.session.checkpoints import NO_SPACE, copy_checkpoint
from npu_bridge.session.damaged_checkpoints import go_on_from_copy

_LOG = logger(__name__)
_NAME = "model.ckpt"
# Free memory needed, in sizes of a copy: an old copy, a new one, and as much for others.
_TIMES_FREE = 3
# Share of a training's time for copies. A checkpoint costs as much again, and the sum is to stay below 1 %.
_SHARE = 0.005
_FIRST_AFTER_RUNS = 10


class CopyInterval:
    """The number of runs between two copies, chosen so that copies take 0.5 % of the time.

    Ranks: collective: all use the measurements of rank 0.
    """

    def __init__(self):
        ranks = collective.current()
        self._agreed = GraphApart(lambda own: ranks.broadcast(own, 0, "memory_checkpoint_runs"), np.int64(0))
        self._costs: collections.deque[float] = collections.deque(maxlen=3)  # the first one builds an executor
        self.runs = _FIRST_AFTER_RUNS
        self.begin()

    def begin(self) -> None:
        """Starts to count."""
        self._made, self._since = 0, time.monotonic()

    def count_run(self) -> bool:
        """Counts a run; returns whether a copy is due after it."""
        self._made += 1
        return self._made >= self.runs

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Measures a block that makes a copy, and sets the interval before the next one."""
        began = time.monotonic()
        secs_per_run = (began - self._since) / self._made
        yield
        self.begin()
        self._costs.append(self._since - began)
        cost = statistics.median(self._costs)
        self.runs = int(self._agreed.run(np.int64(max(1, math.ceil(cost / (_SHARE * secs_per_run))))))

    def close(self) -> None:
        """Closes the session in which ranks agree."""
        self._agreed.close()


class MemoryCheckpoints:
    """The copies of one training's state in the memory of this machine, of which the newest is kept.

    Args:
      folder: folder of the copies, created with the first one.
    """

    def __init__(self, folder: str):
        self._folder = folder
        self._used: set[str] = set()

    def write(self, save: Callable[[str], object], step: int, size_bytes: int) -> str | None:
        """Writes a copy, and removes older ones.

        Args:
          save: writes a checkpoint to a given path.
          step: the global step.
          size_bytes: its expected size.
        Returns:
          The path of the checkpoint; None if memory is too small.
        """
        own = os.getpid()
        place, unfinished = (os.path.join(self._folder, name) for name in (f"{step}-{own}", f"{UNFINISHED}{own}"))
        path = os.path.join(place, _NAME)
        if place in self._used:  # the same step, which is being copied to the disk
            return path
        try:
            os.makedirs(self._folder, 0o700, exist_ok=True)
            if free_bytes(self._folder) < _TIMES_FREE * size_bytes:
                return None
            _remove(unfinished)
            os.mkdir(unfinished)
            save(os.path.join(unfinished, _NAME))
            _remove(place)
            put_in_place(unfinished, place)
        except (OSError, *NO_SPACE):
            with contextlib.suppress(OSError):
                _remove(unfinished)
            return None
        self._remove(lambda number, process: process == own or 0 <= number < step, but=place)
        return path

    def newest(self) -> tuple[int, str] | None:
        """Returns the global step and the path of the newest copy of another process of this job."""
        found = []
        with contextlib.suppress(OSError):
            for name in os.listdir(self._folder):
                step, _, process = name.partition("-")
                if step.isdecimal() and process != str(os.getpid()):
                    found.append((int(step), os.path.join(self._folder, name, _NAME)))
        return max(found, default=None)

    @contextlib.contextmanager
    def used(self, path: str) -> Iterator[None]:
        """Keeps a copy in a block, even if a newer one is written."""
        place = os.path.dirname(path)
        self._used.add(place)
        try:
            yield
        finally:
            self._used.discard(place)

    def forget(self) -> None:
        """Removes the copies of this process and of ended ones, at the end of a training."""
        self._remove(lambda step, process: process == os.getpid() or not os.path.exists(f"/proc/{process}"))
        with contextlib.suppress(OSError):
            if not os.listdir(self._folder):
                _remove(self._folder)

    def _remove(self, is_outdated, but=""):
        """Removes copies by their step and process; another rank of this machine can write here too."""
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self._folder):
                place, (step, _, process) = os.path.join(self._folder, name), name.rpartition("-")
                step_number = int(step) if step.isdecimal() else -1  # -1: unfinished
                if place != but and place not in self._used and is_outdated(step_number, int(process)):
                    _remove(place)


def memory_checkpoints(model_dir: str, of_job: bool = False) -> MemoryCheckpoints | None:
    """Returns the copies of the training in a folder, in the memory of the job, or else of this process.

    Args:
      model_dir: folder of the checkpoints on the disk.
      of_job: return None rather than copies of this process alone.
    """
    root = folder_of_job()
    if root is None and not of_job:
        own = _of_this_process()
        root = own and own.path
    if root is None:
        return None
    real = model_dir if "://" in model_dir else os.path.realpath(model_dir)
    return _at(os.path.join(root, hashlib.sha256(os.fsencode(real)).hexdigest()[:16]))


def take_memory_checkpoint(model_dir: str | None) -> None:
    """Makes the state in memory of an earlier start of this job the newest checkpoint, if it is newer.

    A checkpoint that is damaged does not count.

    Ranks: local, for rank 0; does nothing on others.
    """
    if not model_dir or folder_of_job() is None or collective.current().rank > 0:
        return
    copies = memory_checkpoints(model_dir, of_job=True)
    found = copies and copies.newest()
    if not found:
        return
    step, path = found

    def copy() -> str:
        target = os.path.join(model_dir, f"{_NAME}-{step}")
        tf.io.gfile.makedirs(model_dir)
        copy_checkpoint(path, target)
        return target

    try:
        go_on_from_copy(model_dir, step, copy)
    except tf.errors.OpError as error:
        _LOG.warning("The copy of step %d in memory is left out: it cannot be saved (%s).", step, error.message)


@functools.cache
def _of_this_process() -> MemoryFolder | None:
    folder = make_memory_folder()
    if folder is not None:
        atexit.register(folder.close)
    return folder


@functools.cache
def _at(folder: str) -> MemoryCheckpoints:
    return MemoryCheckpoints(folder)


def _remove(place: str) -> None:
    remove_own(place, lambda path, found: os.path.basename(path).startswith(_NAME))
