"""Hooks for a plain session, which has none of its own."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


def run_with_hooks(session: tf.compat.v1.Session, hooks: Sequence[tf.estimator.SessionRunHook]) -> None:
    """Lets hooks watch every `run` of a session that exists.

    A hook's `before_run` and `after_run` are called as in a MonitoredSession, its `end` when the session closes,
    for whatever reason. `begin` and `after_create_session` are not called: the graph may be half-built, and may
    grow.

    Args:
      session: a `Session` or `InteractiveSession`; its class becomes a subclass of what it was. Functions from
        `make_callable` and `partial_run` are not watched.
      hooks: the hooks; nothing changes when there are none.
    """
    if hooks:
        session._npu_bridge_hooks = tuple(hooks)
        session.__class__ = type(type(session).__name__, (_HookedSession, type(session)), {})


class _HookedSession:
    """Mixed into a session's class."""

    def run(self, fetches, feed_dict=None, options=None, run_metadata=None):
        hooks = self._npu_bridge_hooks
        asked = tf.estimator.SessionRunArgs(fetches, feed_dict, options)
        context = tf.estimator.SessionRunContext(original_args=asked, session=self)
        watched = [(hook, hook.before_run(context)) for hook in hooks]
        extra = [args.fetches if args is not None else [] for _, args in watched]
        if any(extra):
            outcome = super().run({"asked": fetches, "watched": extra}, feed_dict, options, run_metadata)
        else:
            outcome = {
                "asked": super().run(fetches, feed_dict, options, run_metadata),
                "watched": [[] for _ in extra],
            }
        for (hook, _), results in zip(watched, outcome["watched"]):
            hook.after_run(context, tf.estimator.SessionRunValues(results, options, run_metadata))
        return outcome["asked"]

    def close(self):
        try:
            for hook in self._npu_bridge_hooks:
                hook.end(self)
        finally:
            super().close()
