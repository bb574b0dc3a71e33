"""`StopTogether`: if a hook of one rank requests a stop, all ranks end the training after the same step."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base.search import search
from npu_bridge.base.tf_internals.savers import listeners_of
from npu_bridge.collective.small_values import gather_values
from npu_bridge.graph.run import run_of_context, share_run
from npu_bridge.graph.variables import global_step_of

_LIBRARIES = ("builtins", "keras", "npu_bridge", "numpy", "tensorflow", "tensorflow_estimator", "tf_keras")
_SAVER = tf.estimator.CheckpointSaverHook
_EMPTY_CELL = types.CellType()


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
        inner = self._inner_context(run_context)
        answers = [hook.before_run(inner) or tf.estimator.SessionRunArgs([]) for hook in self._hooks]
        self._pass_on_request_in(inner, run_context)
        feeds, options = {}, None
        for answer in answers:
            feeds.update(answer.feed_dict or {})
            options = answer.options or options
        fetches = [[] if answer.fetches is None else answer.fetches for answer in answers]
        goes_on = self._all_continue if self._all_continue is not None and run_of_context(inner).trains else []
        return tf.estimator.SessionRunArgs({"hooks": fetches, "goes_on": goes_on}, feeds or None, options)

    def after_run(self, run_context, run_values):
        inner = self._inner_context(run_context)
        for hook, results in zip(self._hooks, run_values.results["hooks"]):
            hook.after_run(inner, run_values._replace(results=results))
        self._pass_on_request_in(inner, run_context)
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
        inner = tf.estimator.SessionRunContext(run_context.original_args, run_context.session)
        share_run(run_context, inner)
        return inner

    def pass_on_request(self, run_context: tf.estimator.SessionRunContext) -> None:
        """Requests a stop of all ranks, for a saver of this session, which this hook does not call."""
        if self._has_requested:
            return
        self._has_requested = True
        if self._all_continue is None:
            self._request_stop(run_context)
        else:
            run_context.session.run(self._ask)

    def _pass_on_request_in(self, inner, run_context):
        if inner.stop_requested:
            self.pass_on_request(run_context)

    def _request_stop(self, run_context):
        self.was_asked = True
        run_context.request_stop()


def stop_ranks_together(
    hooks: Sequence[tf.estimator.SessionRunHook], spec: tf.estimator.EstimatorSpec, listeners: Sequence | None
) -> tuple[list, tf.estimator.EstimatorSpec, StopTogether]:
    """Replaces all hooks that can stop a single rank by one hook, which stops all ranks together.

    Savers stay. If a saver has a `pass_on_request`, listeners of it can request the stop, too.

    Args:
      hooks: the hooks of a training.
      spec: the EstimatorSpec with other hooks.
      listeners: listeners for the first saver, or None.
    Returns:
      The hooks, the spec, and the new hook, which is among the hooks if any rank needs it.
    Ranks: collective.
    """
    # A single process keeps `training_chief_hooks`: it can be a worker, which does not run them.
    fields = ["training_hooks", *(["training_chief_hooks"] if collective.current().size > 1 else [])]
    given = [*hooks, *(hook for field in fields for hook in getattr(spec, field))]
    stopping = [hook for hook in given if can_hook_request_stop(hook)]
    kept = [hook for hook in hooks if hook not in stopping]
    spec = spec._replace(**{each: [hook for hook in getattr(spec, each) if hook not in stopping] for each in fields})
    savers = [hook for hook in given if isinstance(hook, _SAVER) and hasattr(hook, "pass_on_request")]
    heard = [*(listeners or ()), *(each for saver in savers for each in listeners_of(saver))] if savers else []
    stop, may_stop = StopTogether(stopping), bool(stopping) or any(map(_can_listener_request_stop, heard))
    # Perhaps only one rank can be stopped.
    if any(gather_values(may_stop, "npu_estimator_may_stop")):
        kept.append(stop)
        for saver in savers:
            saver.pass_on_request = stop.pass_on_request
    return kept, spec, stop


def can_hook_request_stop(hook: tf.estimator.SessionRunHook) -> bool:
    """Returns whether the code of a hook can request a stop: its methods, or the scripts' code that they use.

    Returns False for `StopAtStepHook`, which ends all ranks at the same step, for savers, and for the hooks of this
    package.
    """
    parts = search(_followed([hook]), _parts_of)
    return any(isinstance(part, types.CodeType) and "request_stop" in part.co_names for part in parts)


def _can_listener_request_stop(listener):
    """Returns whether the `after_save` of a listener is a script's; its result can stop the training."""
    return not _is_of_library(type(listener).after_save)


def _parts_of(part: Any) -> list:
    """Returns the code in a code, a function, a class or a hook, and what this code calls or holds."""
    if isinstance(part, types.CodeType):
        return [each for each in part.co_consts if isinstance(each, types.CodeType)]
    if isinstance(part, types.FunctionType):
        return [part.__code__, *_followed([] if _is_of_library(part) else _values_named_in(part))]
    kind = part if isinstance(part, type) else type(part)
    methods = [each for base in kind.__mro__ for each in vars(base).values()]
    if kind is part:
        return [*_followed(methods)]
    held = [*vars(part).values()]
    held += [each for several in held if isinstance(several, (list, tuple)) for each in several]
    # Also the methods that a hook inherits from TensorFlow.
    return [*(each for each in methods if isinstance(each, types.FunctionType)), *_followed([*methods, *held])]


def _followed(values: Iterable) -> Iterator:
    """Yields the hooks, and the functions and classes of scripts, among values; of other values, their classes."""
    for value in values:
        if isinstance(value, (staticmethod, classmethod, types.MethodType)):
            value = value.__func__
        is_hook = isinstance(value, tf.estimator.SessionRunHook)
        if is_hook and isinstance(value, (tf.estimator.StopAtStepHook, _SAVER)):
            continue
        code = value if isinstance(value, (types.FunctionType, type)) else type(value)
        if is_hook and not code.__module__.startswith("npu_bridge."):
            yield value
        elif not _is_of_library(code):
            yield code


def _is_of_library(code):
    return str(code.__module__).partition(".")[0] in _LIBRARIES


def _values_named_in(function: types.FunctionType) -> list:
    """Returns the values that a function's code names: globals, values in modules, values of the function around it."""
    names = {name for code in search([function.__code__], _parts_of) for name in code.co_names}
    values = [function.__globals__[name] for name in names & function.__globals__.keys()]
    modules = [vars(value) for value in values if isinstance(value, types.ModuleType)]
    values += [module[name] for module in modules for name in names & module.keys()]
    return [*values, *(cell.cell_contents for cell in function.__closure__ or () if cell != _EMPTY_CELL)]
