"""Calls `SessionRunHook`s around the runs of a plain session, which takes none by itself."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from npu_bridge._session_wrapper import Place, SessionEngine, add_engine


def run_with_hooks(session: tf.compat.v1.Session, hooks: Sequence[tf.estimator.SessionRunHook]) -> None:
    """Lets hooks watch every `run` of a session that exists.

    A hook's `before_run` and `after_run` are called as in a MonitoredSession, its `end` when the session closes,
    for whatever reason. `begin` and `after_create_session` are not called: the graph may be half-built, and may
    grow.

    Args:
      session: a `Session` or `InteractiveSession`. Functions from `make_callable` and `partial_run` are not watched.
      hooks: the hooks; nothing changes when there are none.
    """
    if hooks:
        add_engine(session, _Hooks(hooks))


class _Hooks(SessionEngine):
    """Calls hooks around each run."""

    place = Place.HOOKS

    def __init__(self, hooks: Sequence[tf.estimator.SessionRunHook]):
        self._hooks = tuple(hooks)

    def run(self, session, fetches, feed_dict, options, run_metadata):
        asked = tf.estimator.SessionRunArgs(fetches, feed_dict, options)
        context = tf.estimator.SessionRunContext(original_args=asked, session=session)
        answers = [hook.before_run(context) for hook in self._hooks]
        watched = [args.fetches if args is not None else [] for args in answers]
        if any(watched):
            fetches = {"asked": fetches, "watched": watched}
        outcome = self.inner.run(session, fetches, feed_dict, options, run_metadata)
        if not any(watched):
            outcome = {"asked": outcome, "watched": watched}
        for hook, results in zip(self._hooks, outcome["watched"]):
            hook.after_run(context, tf.estimator.SessionRunValues(results, options, run_metadata))
        return outcome["asked"]

    def close(self, session):
        try:
            for hook in self._hooks:
                hook.end(session)
        finally:
            self.inner.close(session)
