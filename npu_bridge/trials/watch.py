"""Calls hooks around every session run that trains, in a script that knows nothing of them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Callable

import tensorflow as tf

from npu_bridge.graph.operators import computed_ops, elements_of
from npu_bridge.reporting.step_recorder import trains

__all__ = ["HookOfTraining", "TrainingRun", "WatchOfTraining", "watch_losses"]

# By graph: scalars, each with the operators of gradients that were taken of it.
_losses: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class TrainingRun:
    """One kind of run that trains.

    Attributes:
      ops: the operators it computes.
      fed: names of the tensors whose value the script gives.
      loss: the last scalar whose gradients are among them; None without one.
    """

    def __init__(self, graph: tf.Graph, ops: Sequence[tf.Operation], fed: frozenset[str]):
        self.ops, self.fed = tuple(ops), fed
        computed = set(ops)
        known = [loss for loss, gradients in _losses.get(graph, ()) if gradients & computed]
        self.loss = known[-1] if known else None


class HookOfTraining(tf.estimator.SessionRunHook):
    """A `SessionRunHook` of a watch; `begin` and `after_create_session` come before a session's first training run.

    Attributes:
      training: the run that is about to happen, from `begin` on.
    """

    training: TrainingRun


class WatchOfTraining:
    """Stands around `Session.run` of all sessions of a process.

    Args:
      hooks: called in this order; what they ask for is fetched along, what they feed wins over the script.
    """

    def __init__(self, hooks: Sequence[HookOfTraining]):
        self._hooks = tuple(hooks)
        self._kinds: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self._begun: weakref.WeakSet = weakref.WeakSet()
        self._is_inside = False

    def run(self, run: Callable, session: Any, fetches: Any, feed_dict=None, options=None, run_metadata=None) -> Any:
        """A session's run; hooks are called if it trains.

        Args:
          run: the session's own `run`, as a function of the session.
          session, fetches, feed_dict, options, run_metadata: what the script has called it with.
        """
        kind = None if self._is_inside else self._kind(session.graph, fetches, feed_dict)
        if kind is None:
            return run(session, fetches, feed_dict, options, run_metadata)
        self._is_inside = True  # runs of hooks are their own
        try:
            asked = tf.estimator.SessionRunArgs(fetches, feed_dict, options)
            context = tf.estimator.SessionRunContext(original_args=asked, session=session)
            self._begin(session, kind)
            answers = [hook.before_run(context) for hook in self._hooks]
            watched = [None if answer is None else answer.fetches for answer in answers]
            watched = [[] if each is None else each for each in watched]
            fed = dict(feed_dict or {})
            for answer in answers:
                fed.update((answer.feed_dict if answer is not None else None) or {})
            outcome = run(session, {"asked": fetches, "watched": watched}, fed, options, run_metadata)
            for hook, results in zip(self._hooks, outcome["watched"]):
                hook.after_run(context, tf.estimator.SessionRunValues(results, options, run_metadata))
            return outcome["asked"]
        finally:
            self._is_inside = False

    def end(self) -> None:
        """When the script is over."""
        for hook in self._hooks:
            hook.end(None)

    def _begin(self, session, kind):
        for hook in self._hooks:
            hook.training = kind
        if session in self._begun:
            return
        self._begun.add(session)
        with session.graph.as_default():
            for hook in self._hooks:
                hook.begin()
            for hook in self._hooks:
                hook.after_create_session(session, None)

    def _kind(self, graph, fetches, feed_dict):
        """What a run trains; None for one that does not."""
        asked = elements_of(graph, fetches)
        fed = frozenset(tensor.name for tensor in elements_of(graph, list(feed_dict or ())) if hasattr(tensor, "op"))
        known = self._kinds.setdefault(graph, {})
        key = (fed, *(element.name for element in asked))
        if key not in known:
            ops = computed_ops(asked, fed)
            known[key] = TrainingRun(graph, ops, fed) if trains(graph, ops) else None
        return known[key]


def watch_losses(ys: Any, gradients: Any) -> None:
    """Remembers scalars that gradients are taken of, for `TrainingRun.loss`; made for `watch_gradients`."""
    made = frozenset(part.op for part in tf.nest.flatten(gradients, expand_composites=True) if part is not None)
    for tensor in tf.nest.flatten(ys):
        if isinstance(tensor, tf.Tensor) and tensor.shape.rank == 0:
            _losses.setdefault(tensor.graph, []).append((tensor, made))
