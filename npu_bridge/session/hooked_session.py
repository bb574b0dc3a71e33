"""Calls hooks around all runs of a plain session, which has no hooks by itself, or around all training runs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from npu_bridge.base.session_wrapper import EnginePlace, SessionEngine, add_engine
from npu_bridge.graph.run import SessionRun, run_of, run_of_call


def run_with_hooks(session: tf.compat.v1.Session, hooks: Sequence[tf.estimator.SessionRunHook]) -> None:
    """Calls hooks around every `run` of an existing session; does nothing without hooks.

    A hook's `before_run` and `after_run` are called as in a MonitoredSession; its `end` is called whenever the session
    closes. `begin` and `after_create_session` are not called, because the graph can be incomplete and can grow. Keras
    trains, evaluates and predicts in a graph with hooks, too. Runs through `partial_run` call no hooks, nor do those
    through `make_callable` without a list of feeds, unless the session lowers dtypes.
    """
    if hooks:
        add_engine(session, _HookEngine(hooks))


class TrainingHook(tf.estimator.SessionRunHook):
    """A hook that is called around each `session.run` that trains, but around no other run.

    Attributes:
      training: the description of the first such run; set before `begin`, right before that run.
      is_over: whether the hook needs no further runs.
    """

    training: SessionRun
    is_over = False

    def before_close(self, session: tf.compat.v1.Session) -> None:
        """Called before a session that has trained closes; subclasses override this method."""


class _CallsAsRuns(SessionEngine):
    """Makes runs, which have hooks, of the calls of prepared functions, by which Keras trains in a graph."""

    def has_hooks_around(self, session: tf.compat.v1.Session, callable_options: Any) -> bool:
        """Returns whether hooks are to be called around a call now."""
        return True

    def prepare_call(self, session, callable_options):
        """Prepares a function, which runs the session if the call has hooks around it."""
        call = self.inner.prepare_call(session, callable_options)
        if callable_options.tensor_connection:
            return call

        def run_or_call(*values, run_metadata=None):
            if not self.has_hooks_around(session, callable_options):
                return call(*values, run_metadata=run_metadata)
            fetched, options = callable_options.fetch, callable_options.run_options
            asked = [session.graph.as_graph_element(name) for name in (*fetched, *callable_options.target)]
            feeds = dict(zip(callable_options.feed, values))
            return session.run(asked, feeds, options, run_metadata)[: len(fetched)]

        return run_or_call


class TrainingHookEngine(_CallsAsRuns):
    """Calls hooks, in order, around all training runs of all sessions of a process.

    A run also fetches the tensors that the hooks request. Feeds of the hooks win over feeds of the script.
    """

    def __init__(self, hooks: Sequence[TrainingHook]):
        self._hooks = tuple(hooks)
        self._begun_sessions: weakref.WeakSet = weakref.WeakSet()
        self._in_hooked_run = threading.local()  # hooks are not called around runs that hooks make

    def run(self, session, fetches, feed_dict, options, run_metadata):
        is_idle = hasattr(self._in_hooked_run, "session") or all(hook.is_over for hook in self._hooks)
        training = None if is_idle else run_of(session.graph, fetches, feed_dict)
        if training is None or not training.trains:
            return self.inner.run(session, fetches, feed_dict, options, run_metadata)
        self._in_hooked_run.session = session
        try:
            self._begin_hooks(session, training)
            return _run_with_hooks(self.inner.run, self._hooks, session, fetches, feed_dict, options, run_metadata)
        finally:
            del self._in_hooked_run.session

    def has_hooks_around(self, session, callable_options):
        return not hasattr(self._in_hooked_run, "session") and run_of_call(session.graph, callable_options).trains

    def close(self, session):
        """Calls `before_close` of the hooks, while variables can still be read, and then closes the session."""
        if session in self._begun_sessions and not hasattr(self._in_hooked_run, "session"):
            self._in_hooked_run.session = session
            try:
                for hook in self._hooks:
                    hook.before_close(session)
            finally:
                del self._in_hooked_run.session
        self.inner.close(session)

    def end(self) -> None:
        """Calls the hooks' `end`, at the end of the script."""
        for hook in self._hooks:
            hook.end(None)

    def _begin_hooks(self, session, training):
        for hook in self._hooks:
            hook.training = training
        if session in self._begun_sessions:
            return
        self._begun_sessions.add(session)
        with session.graph.as_default():
            for hook in self._hooks:
                hook.begin()
            for hook in self._hooks:
                hook.after_create_session(session, None)


class _HookEngine(_CallsAsRuns):
    """Calls hooks around each run of a session, and around each call by which Keras trains in a graph."""

    place = EnginePlace.HOOKS

    def __init__(self, hooks: Sequence[tf.estimator.SessionRunHook]):
        self._hooks = tuple(hooks)

    def run(self, session, *arguments):
        return _run_with_hooks(self.inner.run, self._hooks, session, *arguments)

    def close(self, session):
        try:
            for hook in self._hooks:
                hook.end(session)
        finally:
            self.inner.close(session)


def _run_with_hooks(run, hooks, session, fetches, feed_dict, options, run_metadata):
    """Runs a session with hooks; feeds and run options of the hooks win over those of the script."""
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
