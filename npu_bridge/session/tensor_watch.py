"""A base class of hooks that fetch chosen tensors in chosen runs; dumps and overflow detection are such hooks."""

from __future__ import annotations

import logging
import threading
import weakref
from typing import NamedTuple

import tensorflow as tf

from npu_bridge.graph.run import Run, run_of

_LOG = logging.getLogger(__name__)


class _Pending(NamedTuple):
    run: Run
    step: int
    names: list


class TensorWatch(tf.estimator.SessionRunHook):
    """Fetches tensors along with a run and hands their values to `seen`.

    Nothing is added to the graph and nothing is computed that the run would not compute. Steps count from 0 for
    each kind of run (see `Run.purpose`), as long as this object lives. A TF 1 reference variable that is
    updated in the same step may show its new value.
    """

    def __init__(self):
        self._lock = threading.RLock()
        self._steps: dict = {}
        self._pending: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self._is_off = False

    def wanted(self, run: Run, step: int) -> list:
        """Names of the tensors to look at, of `run.values`; subclasses say which."""
        raise NotImplementedError

    def seen(self, run: Run, step: int, values: dict) -> None:
        """Takes the values, numpy arrays by tensor name."""
        raise NotImplementedError

    def before_run(self, run_context):
        """Asks for the tensors."""
        if self._is_off:
            return None
        with self._lock:
            asked = run_context.original_args
            run = run_of(run_context.session.graph, asked.fetches, asked.feed_dict)
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
