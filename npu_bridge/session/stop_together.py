"""`StopTogether`: if a hook of one rank requests a stop, all ranks end the training after the same step."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.graph.run import run_of
from npu_bridge.graph.variables import global_step_of


class StopTogether(tf.estimator.SessionRunHook):
    """A hook that calls other hooks. If one of them requests a stop on any rank, the training ends on all ranks.

    A rank that stops alone leaves the other ranks waiting for its gradients. So with several ranks a request does not
    stop the rank at once: the next training step passes the request on, and then all ranks stop. A single rank stops at
    once. `NPUEstimator` wraps hooks that can stop a training in this hook, such as those of
    `tf.estimator.experimental.stop_if_no_decrease_hook`.

    Cost: on several ranks, an all-reduce of one number in each step.

    Args:
      hooks: hooks that can call `run_context.request_stop()`; empty on ranks without such hooks.
    Attributes:
      was_asked: whether the training has stopped because a hook on any rank requested it.
      step: after `end`, the global step at which this hook has stopped the training; None if the hook has not stopped
        the training, or the graph has no global step.
    Ranks: every rank needs the hook.
    Example:
      >>> with MonitoredTrainingSession(hooks=[StopTogether([stop_hook]), NPUBroadcastGlobalVariablesHook(0)]) as s:
    """

    def __init__(self, hooks: Sequence[tf.estimator.SessionRunHook]):
        self._hooks = tuple(hooks)
        self._has_requested = self.was_asked = False
        self.step: int | None = None

    @property
    def has_hooks(self) -> bool:
        """Whether this rank has hooks to call."""
        return bool(self._hooks)

    def begin(self):
        self._has_requested = self.was_asked = False
        self.step = self._all_continue = None
        for hook in self._hooks:
            hook.begin()
        if collective.current().size > 1:
            own = tf.compat.v1.Variable(
                False,
                trainable=False,
                collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
                use_resource=True,
                name="stop_together",
            )
            # A variable, not a feed: TensorFlow prepares a run with other feeds anew.
            self._ask = own.assign(True).op
            self._all_continue = collective.current().all_true(tf.logical_not(own.read_value()), "stop_together")

    def after_create_session(self, session, coord):
        for hook in self._hooks:
            hook.after_create_session(session, coord)

    def before_run(self, run_context):
        asked = run_context.original_args
        inner = self._inner_context(run_context)
        answers = [hook.before_run(inner) or tf.estimator.SessionRunArgs([]) for hook in self._hooks]
        self._pass_on_request(inner, run_context)
        feeds, options = {}, None
        for answer in answers:
            feeds.update(answer.feed_dict or {})
            options = answer.options or options
        run = run_of(run_context.session.graph, asked.fetches, asked.feed_dict)
        fetches = [[] if answer.fetches is None else answer.fetches for answer in answers]
        goes_on = self._all_continue if self._all_continue is not None and run.trains else []
        return tf.estimator.SessionRunArgs({"hooks": fetches, "goes_on": goes_on}, feeds or None, options)

    def after_run(self, run_context, run_values):
        inner = self._inner_context(run_context)
        for hook, results in zip(self._hooks, run_values.results["hooks"]):
            hook.after_run(inner, run_values._replace(results=results))
        self._pass_on_request(inner, run_context)
        goes_on = run_values.results["goes_on"]
        if not isinstance(goes_on, list) and not bool(goes_on):
            self._request_stop(run_context)

    def end(self, session):
        global_step = global_step_of()
        if self.was_asked and global_step is not None:
            self.step = int(session.run(global_step))
        for hook in self._hooks:
            hook.end(session)

    def _inner_context(self, run_context):
        """Returns a separate context for the hooks, which records a request to stop without acting on it."""
        return tf.estimator.SessionRunContext(run_context.original_args, run_context.session)

    def _pass_on_request(self, inner, run_context):
        if not inner.stop_requested or self._has_requested:
            return
        self._has_requested = True
        if self._all_continue is None:
            self._request_stop(run_context)
        else:
            run_context.session.run(self._ask)

    def _request_stop(self, run_context):
        self.was_asked = True
        run_context.request_stop()


def can_hook_request_stop(hook: tf.estimator.SessionRunHook) -> bool:
    """Returns whether a hook's code can request a stop.

    Returns False for `StopAtStepHook`, which ends all ranks at the same step, for savers, and for the hooks of this
    package.
    """
    if isinstance(hook, (tf.estimator.StopAtStepHook, tf.estimator.CheckpointSaverHook, StopTogether)):
        return False
    if type(hook).__module__.startswith("npu_bridge."):
        return False
    functions = [function for kind in type(hook).__mro__ for function in vars(kind).values()]
    return any("request_stop" in getattr(getattr(each, "__code__", None), "co_names", ()) for each in functions)
