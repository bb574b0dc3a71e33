"""Defines a base class for hooks that fetch chosen tensors in chosen runs: for dumps and overflow detection."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base.secondary_files import NonFatalOutput
from npu_bridge.graph.run import SessionRun, run_of_context
from npu_bridge.options import TrainingOptions
from npu_bridge.session.dump_files import DumpedTensor, DumpFolder, write_statistics, write_tensors


class _PendingRun(NamedTuple):
    run: SessionRun
    step: int
    names: list


class TensorWatch(tf.estimator.SessionRunHook):
    """A base class for hooks that fetch tensors in a run and pass them to `handle_fetched_values`; it can write them.

    It adds no operators to the graph, and no computation to a run. Steps are counted from 0, separately for each kind
    of run (`SessionRun.purpose`), during the life of this object. A TF 1 reference variable that is updated in the same
    step can show its new value.

    Args:
      options: the options of the run.
      graph_name: name of the graph's folder; by default the name of the first element that a run fetches.
    """

    def __init__(self, options: TrainingOptions, graph_name: str | None = None):
        self._writes_statistics = options.dump_data == "stats"
        self._graph_name = graph_name
        self._rank = collective.current().rank
        self._folder = DumpFolder(options.dump_path, self._rank)
        self._secondary = NonFatalOutput(f"the dump in {options.dump_path}")
        self._lock = threading.RLock()
        self._steps: dict = {}
        self._pending: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self._is_stopped = False

    def names_to_fetch(self, run: SessionRun, step: int) -> list:
        """Returns the names of the tensors to fetch, out of `run.values`; subclasses implement this."""
        raise NotImplementedError

    def handle_fetched_values(self, run: SessionRun, step: int, values: dict) -> None:
        """Receives the fetched values, numpy arrays by tensor name; subclasses implement this."""
        raise NotImplementedError

    def before_run(self, run_context):
        """Fetches the tensors named by `names_to_fetch`."""
        if self._is_stopped:
            return None
        with self._lock:
            run = run_of_context(run_context)
            step = self._steps.get(run.purpose, 0)
            names = self.names_to_fetch(run, step)
            self._pending[run_context] = _PendingRun(run, step, names)
        return tf.estimator.SessionRunArgs(names) if names else None

    def after_run(self, run_context, run_values):
        """Passes the fetched values to `handle_fetched_values`, and counts the step."""
        pending = self._pending.pop(run_context, None)
        if pending is None:
            return
        with self._lock:
            self._steps[pending.run.purpose] = pending.step + 1
            if pending.names:
                values = dict(zip(pending.names, run_values.results))
                self._secondary.attempt(self.handle_fetched_values, pending.run, pending.step, values)

    def stop(self) -> None:
        """Stops fetching: later runs fetch no tensors."""
        self._is_stopped = True

    def graph_name_of(self, run: SessionRun) -> str:
        """Returns the name of the graph of a run, as folders of dumps have it."""
        return self._graph_name or run.name

    def write_tensors_of_step(self, run: SessionRun, step: int, tensor_places: Iterable[tuple], values: dict) -> str:
        """Writes the tensors at places from `find_tensor_places`, or their statistics; returns the step's folder."""
        folder = self._folder.make_step_folder(self.graph_name_of(run), run.purpose, step)
        tensors = (
            DumpedTensor(op.name, op.type, side, slot, tensor.name, values[tensor.name])
            for op, side, slot, tensor in tensor_places
        )
        if self._writes_statistics:
            write_statistics(folder, tensors)
        else:
            write_tensors(folder, tensors, graph=self.graph_name_of(run), step=step)
        return folder


def find_tensor_places(ops: Iterable[tf.Operation], sides: Iterable[str], names: Any) -> Iterator[tuple]:
    """Yields (operator, side, slot, tensor) for inputs and outputs of operators, if the tensor's name is in `names`."""
    for op in ops:
        for side in sides:
            for slot, tensor in enumerate(op.inputs if side == "input" else op.outputs):
                if tensor.name in names:
                    yield op, side, slot, tensor
