"""A base class of hooks that fetch chosen tensors in chosen runs; dumps and overflow detection are such hooks."""

from __future__ import annotations

import logging
import threading
import weakref
from typing import NamedTuple

import tensorflow as tf

from npu_bridge.session.run_view import RunView, view_of

_LOG = logging.getLogger(__name__)


class _Pending(NamedTuple):
    run: RunView
    step: int
    names: list


class TensorWatch(tf.estimator.SessionRunHook):
    """Fetches tensors along with a run and hands their values to `seen`.

    Nothing is added to the graph and nothing is computed that the run would not compute. Steps count from 0 for
    each kind of run (see `RunView.purpose`), as long as this object lives. A TF 1 reference variable that is
    updated in the same step may show its new value.
    """

    def __init__(self):
        self._lock = threading.RLock()
        self._views: dict = {}
        self._version = None
        self._steps: dict = {}
        self._pending: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self._is_off = False

    def wanted(self, run: RunView, step: int) -> list:
        """Names of the tensors to look at, of `run.values`; subclasses say which."""
        raise NotImplementedError

    def seen(self, run: RunView, step: int, values: dict) -> None:
        """Takes the values, numpy arrays by tensor name."""
        raise NotImplementedError

    def before_run(self, run_context):
        """Asks for the tensors."""
        if self._is_off:
            return None
        with self._lock:
            run = self._view(run_context)
            step = self._steps.get(run.purpose, 0)
            names = self.wanted(run, step)
            self._pending[run_context] = _Pending(run, step, names)
        return tf.estimator.SessionRunArgs(names) if names else None

    def after_run(self, run_context, run_values):
        """Hands over what came back, and counts the step."""
        pending = self._pending.pop(run_context, None)
        if pending is None:
            return
        with self._lock:
            self._steps[pending.run.purpose] = pending.step + 1
            if pending.names:
                self._hand_over(pending, dict(zip(pending.names, run_values.results)))

    def stop(self) -> None:
        """Looks at nothing any more."""
        self._is_off = True

    def _hand_over(self, pending, values):
        try:
            self.seen(pending.run, pending.step, values)
        except OSError as error:  # a full disk is no reason to lose a training
            self.stop()
            _LOG.error("dump_config: nothing is dumped any more, because writing failed: %s", error)

    def _view(self, run_context) -> RunView:
        graph, asked = run_context.session.graph, run_context.original_args
        if self._version != graph.version:  # it has grown
            self._views.clear()
            self._version = graph.version
        key = (_identity(asked.fetches), _identity(list(asked.feed_dict or ())))
        if key not in self._views:
            self._views[key] = view_of(graph, asked.fetches, asked.feed_dict)
        return self._views[key]


def _identity(structure):
    """What tells one structure of fetches from another: its leaves' names, or themselves."""
    if isinstance(structure, dict):
        return tuple(_identity(part) for part in structure.values())
    if isinstance(structure, (list, tuple)):
        return tuple(_identity(part) for part in structure)
    name = getattr(structure, "name", None)
    return name if isinstance(name, str) else str(structure)
