"""Calls hooks around runs: all runs of a plain session, which takes no hooks by itself, or all runs that train."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

import tensorflow as tf

from npu_bridge.base.session_wrapper import Place, SessionEngine, add_engine
from npu_bridge.graph.run import Run, run_of, run_of_call


def run_with_hooks(session: tf.compat.v1.Session, hooks: Sequence[tf.estimator.SessionRunHook]) -> None:
    """Calls hooks around every `run` of an existing session; does nothing without hooks.

    A hook's `before_run` and `after_run` are called as in a MonitoredSession, its `end` whenever the session closes.
    `begin` and `after_create_session` are not called: the graph may be half-built, and may
    grow. Functions from `make_callable` and `partial_run` are not watched.
    """
    if hooks:
        add_engine(session, _Hooks(hooks))


class HookOfTraining(tf.estimator.SessionRunHook):
    """A hook of `WatchOfTraining`, which calls `begin` and `after_create_session` before the first training run.

    Attributes:
      training: the run that is about to happen, from `begin` on.
      is_over: it needs no further run.
    """

    training: Run
    is_over = False

    def before_close(self, session: tf.compat.v1.Session) -> None:
        """Runs before a session that has trained closes; subclasses override this."""


class WatchOfTraining(SessionEngine):
    """Calls hooks, in order, around the runs that train, of all sessions of a process.

    A run also fetches what the hooks ask for; their feeds win over those of the script.
    """

    def __init__(self, hooks: Sequence[HookOfTraining]):
        self._hooks = tuple(hooks)
        self._begun: weakref.WeakSet = weakref.WeakSet()
        self._inside = threading.local()  # runs of hooks are their own

    def run(self, session, fetches, feed_dict, options, run_metadata):
        is_idle = hasattr(self._inside, "session") or all(hook.is_over for hook in self._hooks)
        training = None if is_idle else run_of(session.graph, fetches, feed_dict)
        if training is None or not training.trains:
            return self.inner.run(session, fetches, feed_dict, options, run_metadata)
        self._inside.session = session
        try:
            self._begin(session, training)
            return _hooked_run(self.inner.run, self._hooks, session, fetches, feed_dict, options, run_metadata)
        finally:
            del self._inside.session

    def prepare_call(self, session, callable_options):
        """Prepares a function through which Keras trains in a graph: its calls become runs with hooks."""
        call = self.inner.prepare_call(session, callable_options)
        if callable_options.tensor_connection:
            return call

        def run_or_call(*values, run_metadata=None):
            graph = session.graph
            if hasattr(self._inside, "session") or not run_of_call(graph, callable_options).trains:
                return call(*values, run_metadata=run_metadata)
            fetched, options = callable_options.fetch, callable_options.run_options
            asked = [graph.as_graph_element(name) for name in (*fetched, *callable_options.target)]
            feeds = dict(zip(callable_options.feed, values))
            return session.run(asked, feeds, options, run_metadata)[: len(fetched)]

        return run_or_call

    def close(self, session):
        """Calls the hooks' `before_close`, in which they can still read variables, and closes the session."""
        if session in self._begun and not hasattr(self._inside, "session"):
            self._inside.session = session
            try:
                for hook in self._hooks:
                    hook.before_close(session)
            finally:
                del self._inside.session
        self.inner.close(session)

    def end(self) -> None:
        """Calls the hooks' `end`, at the end of the script."""
        for hook in self._hooks:
            hook.end(None)

    def _begin(self, session, training):
        for hook in self._hooks:
            hook.training = training
        if session in self._begun:
            return
        self._begun.add(session)
        with session.graph.as_default():
            for hook in self._hooks:
                hook.begin()
            for hook in self._hooks:
                hook.after_create_session(session, None)


class _Hooks(SessionEngine):
    """Calls hooks around each run of a session."""

    place = Place.HOOKS

    def __init__(self, hooks: Sequence[tf.estimator.SessionRunHook]):
        self._hooks = tuple(hooks)

    def run(self, session, *arguments):
        return _hooked_run(self.inner.run, self._hooks, session, *arguments)

    def close(self, session):
        try:
            for hook in self._hooks:
                hook.end(session)
        finally:
            self.inner.close(session)


def _hooked_run(run, hooks, session, fetches, feed_dict, options, run_metadata):
    """Runs a session with hooks; values and run options that they give win over those of the script."""
    asked = tf.estimator.SessionRunArgs(fetches, feed_dict, options)
    context = tf.estimator.SessionRunContext(original_args=asked, session=session)
    answers = [hook.before_run(context) or tf.estimator.SessionRunArgs([]) for hook in hooks]
    for answer in answers:
        if answer.feed_dict:
            feed_dict = {**(feed_dict or {}), **answer.feed_dict}
        if answer.options is not None:
            options = answer.options
            run_metadata = tf.compat.v1.RunMetadata() if run_metadata is None else run_metadata
    watched = [[] if answer.fetches is None else answer.fetches for answer in answers]
    outcome = run(session, {"asked": fetches, "watched": watched}, feed_dict, options, run_metadata)
    for hook, results in zip(hooks, outcome["watched"]):
        hook.after_run(context, tf.estimator.SessionRunValues(results, options, run_metadata))
    return outcome["asked"]
