"""Makes a live session build each of its executors in the current precision.

TensorFlow keeps one executor for each set of fetches and targets, and builds the executor at the first run of the set.
During the build, TensorFlow's rewriter for mixed precision reads its lists from the environment. So this module builds
executors ahead of the first run, and sets the lists in the environment only for the build. A second executor of one
set, in another precision, needs a different set: an operator that does nothing is added, or one more value is fed for
an imitated dtype. The session keeps its variables, its iterators and the state of its random operators.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any, Callable, NamedTuple

import tensorflow as tf

from npu_bridge.base import environment
from npu_bridge.base.errors import message, say_once
from npu_bridge.base.session_wrapper import EnginePlace, SessionEngine, add_engine, find_engine
from npu_bridge.base.tf_internals.graphs import allow_graph_changes, function_definition
from npu_bridge.base.tf_internals.sessions import can_build_without_running, is_remote, read_content, run_options_buffer
from npu_bridge.gradients.collections import LOSS_SCALE
from npu_bridge.graph.run import SessionRun, run_of, run_of_call
from npu_bridge.session.precision.modes import FLOAT16, Policy
from npu_bridge.session.precision.policy import Precision
from npu_bridge.session.precision.rounded_functions import count_float32_operators
from npu_bridge.session.precision.rounding import is_rounding_op

MARKER = "npu_bridge_original_precision"
# No session has so many thread pools. A direct session of TensorFlow 2.15 builds the executor of a run, keeps it, and
# only then refuses a pool it does not have.
_MISSING_POOL = 2**31 - 1
# What to write for a loss scale.
_SCALED_OPTIMIZER = "NPUOptimizer(optimizer, ExponentialUpdateLossScaleManager(2**15, 1000), is_loss_scale=True)"
_SCALED_KERAS_OPTIMIZER = "npu_keras_optimizer(optimizer, ExponentialUpdateLossScaleManager(2**15, 1000))"


class Build(NamedTuple):
    """Facts about an executor that was built: its policy, whether its run trains, and the time of the build."""

    policy: Policy
    is_training: bool
    secs: float


def attach_precision(session: tf.compat.v1.Session, precision: Precision) -> None:
    """Makes a session follow the precision of a training; no effect on a session that already follows one.

    The session's settings must have gone through `Precision.prepare`. Runs made before keep their executors.

    Graph: adds one operator that does nothing, also to a finalized graph, when the precision can switch.
    """
    if not precision.is_active or find_engine(session, _PrecisionEngine) is not None:
        return
    if is_remote(session):
        say_once(logging.WARNING, "precision: sessions on a remote TensorFlow server keep the dtypes of their graph.")
        return
    executors = _PrecisionEngine(session.graph, precision)
    executors.round_new_operators()
    add_engine(session, executors)


def precision_of_session(session: tf.compat.v1.Session) -> Precision | None:
    """Returns the precision that a session follows; None for a session that was not passed to `attach_precision`."""
    executors = find_engine(session, _PrecisionEngine)
    return executors.precision if executors is not None else None


def list_builds(session: tf.compat.v1.Session) -> list[Build]:
    """Returns a `Build` for each executor of a session, in order; [] for a session without `attach_precision`."""
    executors = find_engine(session, _PrecisionEngine)
    return list(executors.builds) if executors is not None else []


def policy_of_last_step(session: tf.compat.v1.Session) -> Policy | None:
    """Returns the policy that the latest training run of a session has really followed.

    Returns None before the first training run, and for a session without `attach_precision`.
    """
    executors = find_engine(session, _PrecisionEngine)
    return executors.precision.policy_followed_by_steps(executors.last_training) if executors is not None else None


@contextlib.contextmanager
def sharing_one_policy(session: tf.compat.v1.Session) -> Iterator[None]:
    """Gives one policy to all runs of the block that train the same variables; used for loops of steps.

    Ranks: collective; the ranks decide once, before the first run of the block.
    """
    executors = find_engine(session, _PrecisionEngine)
    if executors is None:
        yield
        return
    executors.decided = {}
    try:
        yield
    finally:
        executors.decided = None


@contextlib.contextmanager
def with_policy_of_last_step(session: tf.compat.v1.Session) -> Iterator[None]:
    """Gives the policy of the session's latest training run to all runs of the block that do not train."""
    executors = find_engine(session, _PrecisionEngine)
    if executors is None:
        yield
        return
    executors.decided = {frozenset(): executors.last_training}
    try:
        yield
    finally:
        executors.decided = None


class _PrecisionEngine(SessionEngine):
    """A layer around the runs of a session (a session engine): builds executors, and chooses one for each run."""

    place = EnginePlace.PRECISION
    needs_all_runs = True

    def __init__(self, graph: tf.Graph, precision: Precision):
        self.builds: list[Build] = []
        self.last_training: Policy | None = None
        self.decided: dict[frozenset, Policy] | None = None  # by what is trained, while a decision is kept
        self.graph = graph
        self.lock = threading.RLock()
        self.precision = precision
        self._unscaled: Policy | None = None  # of a training without loss scaling, until the warning
        self._marker = _find_or_make_marker(graph) if precision.switch is not None else None
        self._runs: dict[tuple, SessionRun] = {}
        self._built: set[tuple] = set()  # runs with an executor, if the session builds executors only in runs
        self._targets: dict[tuple, list[tf.Operation]] = {}

    def execute(self, session, request):
        self.round_new_operators()
        request, policy, run = self._adapt_request(session, request)
        if run.trained_variable_names:
            self._note_training_step(policy, run)
        results = self._execute_or_build(session, request, policy)
        if run.trained_variable_names:
            self._warn_if_unscaled(policy, _SCALED_OPTIMIZER)
        return results

    def _note_training_step(self, policy, run):
        def count():
            kept = {*self.precision.ops_keeping_dtype(policy, run.ops), *filter(is_rounding_op, run.ops)}
            nodes = [op.node_def for op in run.ops if op not in kept and op.type != "Const"]
            return count_float32_operators(nodes, functools.partial(function_definition, self.graph))

        imitation = self.precision.imitation
        self.precision.note_training_step(policy, self.graph, count, lambda: imitation.is_rounding(policy, run.ops))

    def _execute_or_build(self, session, request, policy):
        """Executes a run; if the executor cannot be built ahead, it is built in this run."""
        if can_build_without_running(session):
            return self.inner.execute(session, request)
        options = b"" if request.options is None else read_content(request.options)
        key = (policy, options, *(element.name for element in request.requested_elements))
        with contextlib.nullcontext() if key in self._built else self._rewriter_lists(policy):
            results = self.inner.execute(session, request)
        self._built.add(key)
        return results

    def set_up_partial_run(self, session, fetches, feeds):
        self.round_new_operators()
        guards = self._feeds_of_rounding_flags(self.precision.configured)
        with self._rewriter_lists(self.precision.configured):
            handle = self.inner.set_up_partial_run(session, fetches, [*(feeds or ()), *guards])
        if guards:
            session.partial_run(handle, [], guards)  # its first part
        return handle

    def prepare_call(self, session, callable_options):
        """Prepares a callable, through which Keras trains in a TF 1 graph; each call follows the current precision."""
        self.round_new_operators()
        run = run_of_call(self.graph, callable_options)
        made: dict[Policy, Callable] = {}

        def current_call():
            policy = self.policy_of(run)
            if run.trained_variable_names:
                self._note_training_step(policy, run)
            with self.lock:
                if policy not in made:
                    made[policy] = self._prepare_call_for_policy(session, callable_options, run, policy)
                return made[policy]

        if not run.trained_variable_names:
            current_call()  # raises errors now

        def call_and_warn(*arguments, **keywords):
            results = current_call()(*arguments, **keywords)
            if run.trained_variable_names:
                self._warn_if_unscaled(self.last_training, _SCALED_KERAS_OPTIMIZER)
            return results

        return call_and_warn

    def _prepare_call_for_policy(self, session, callable_options, run, policy):
        """Makes a callable from a CallableOptions; the callable follows one policy."""
        options = type(callable_options)()
        options.CopyFrom(callable_options)
        feeds = self._feeds_of_rounding_flags(policy)
        options.feed.extend(tensor.name for tensor in feeds)
        for names in (options.fetch, options.target):
            elements = [self.graph.as_graph_element(name) for name in names]
            names[:] = [element.name for element in self._replace_graph_elements(policy, elements)]

        def prepare_with(more_targets):
            options.target.extend(op.name for op in more_targets)
            return self.inner.prepare_call(session, options)

        call, values = self.build_executor(run, policy, prepare_with), list(feeds.values())
        return lambda *arguments, **keywords: call(*arguments, *values, **keywords)

    def _adapt_request(self, session, request):
        """Changes a request so that it uses the executor of the right precision; builds this executor if needed.

        Returns:
          The request, the policy, and the `SessionRun` that describes the request.
        """
        debug_options = b""  # executors depend on these run options only
        if request.options is not None:
            given = tf.compat.v1.RunOptions.FromString(read_content(request.options))
            debug_options = given.debug_options.SerializeToString()
        names = [tuple(element.name for element in asked) for asked in (request.fetches, request.targets)]
        fed = tuple(sorted(tensor.name for tensor in request.fed))
        key = (*names, fed, debug_options)
        if key not in self._runs:
            self._runs[key] = run_of(self.graph, [*request.fetches, *request.targets], fed)
        run = self._runs[key]
        policy = self.policy_of(run)
        feeds = {tensor.ref(): value for tensor, value in self._feeds_of_rounding_flags(policy).items()}
        request = request._replace(
            fetches=self._replace_graph_elements(policy, request.fetches),
            targets=self._replace_graph_elements(policy, request.targets),
            feeds={**request.feeds, **feeds},
        )

        def build_with(more_targets):
            targets = [*request.targets, *more_targets]
            if can_build_without_running(session):
                self._build_without_running(session, request._replace(targets=targets), debug_options)
            return targets

        with self.lock:
            if (key, policy) not in self._targets:
                self._targets[key, policy] = self.build_executor(run, policy, build_with)
            return request._replace(targets=self._targets[key, policy]), policy, run

    def _feeds_of_rounding_flags(self, policy):
        imitation = self.precision.imitation
        return {} if imitation is None else imitation.rounding_flag_feeds(policy, self.graph)

    def _replace_graph_elements(self, policy, elements):
        imitation = self.precision.imitation
        return list(elements) if imitation is None else imitation.replace_tensors_and_ops(policy, self.graph, elements)

    def _build_without_running(self, session, request, debug_options):
        """Makes TensorFlow build the executor of a run without running it."""
        run_options = tf.compat.v1.RunOptions(inter_op_thread_pool=_MISSING_POOL)
        run_options.debug_options.MergeFromString(debug_options)
        with run_options_buffer(run_options) as options:
            try:
                self.inner.execute(session, request._replace(options=options, metadata=None))
            except tf.errors.InvalidArgumentError as error:
                if "inter_op_thread_pool" not in error.message:
                    raise

    def round_new_operators(self) -> None:
        """Adds rounding to operators that the session has not run yet; TensorFlow would ignore a later change."""
        with self.lock:
            self.precision.round_new_operators(self.graph)

    def policy_of(self, run: SessionRun) -> Policy:
        """Returns the policy of a run that is about to start; can wait for other ranks, so call it without the lock."""
        decided = self.decided if self.decided is not None else {}
        policy = decided.get(run.trained_variable_names)
        if policy is None:
            policy = decided[run.trained_variable_names] = self.precision.policy_of_run(run.trained_variable_names)
        if run.trained_variable_names:
            if self.last_training is None:
                self.precision.warn_of_unknown_operators(self.graph)
            self.last_training = policy
        return policy

    def build_executor(
        self, run: SessionRun, policy: Policy, build_function: Callable[[list[tf.Operation]], Any]
    ) -> Any:
        """Builds an executor under a policy by calling `build_function` with additional targets; returns its result."""
        precision = self.precision
        if run.trained_variable_names and policy == precision.configured and policy.low_dtype == FLOAT16:
            self._unscaled = None if _is_scaled(run) else policy
        is_switched = precision.switch is not None and run.trained_variable_names and policy is not precision.low
        kept = precision.ops_keeping_dtype(policy, run.ops) if precision.imitation is None else ()
        more_targets = [*kept, *([self._marker] if is_switched else ())]
        with self._rewriter_lists(policy):
            start = time.perf_counter()
            built = build_function(more_targets)
            secs = time.perf_counter() - start
        if (
            is_switched
            and not precision.has_no_effect
            and not any(build.is_training and build.policy == policy for build in self.builds)
        ):
            precision.switch.log_switch(secs)
        self.builds.append(Build(policy, bool(run.trained_variable_names), secs))
        return built

    def _warn_if_unscaled(self, policy, optimizer):
        """Warns once, on rank 0, after a training step in float16 without a loss scale; names what to write."""
        if self._unscaled != policy:
            return
        self._unscaled = None
        if not self.precision.has_no_effect and environment.probable_rank() == 0:
            problem = "this training computes in float16, where small gradients become zero"
            say_once(logging.WARNING, message("precision", problem, "a loss scale", "none", f"Write {optimizer}."))

    def _rewriter_lists(self, policy):
        if self.precision.imitation is not None:
            return contextlib.nullcontext()
        return environment.set_variables_temporarily(
            functools.partial(self.precision.make_rewriter_environment, policy, self.graph)
        )


def _is_scaled(training: SessionRun) -> bool:
    """Returns whether a training scales its loss; recognizes a hand-made loss scale by its name."""
    names = (op.name.lower() for op in training.ops)
    return bool(training.ops[0].graph.get_collection(LOSS_SCALE)) or any("loss_scale" in name for name in names)


def _find_or_make_marker(graph: tf.Graph) -> tf.Operation:
    """Returns a graph's no-op that marks runs after the switch of precision; creates it at the first call."""
    try:
        return graph.get_operation_by_name(MARKER)
    except KeyError:
        with allow_graph_changes(graph), graph.as_default(), tf.name_scope(""), tf.control_dependencies(None):
            with tf.device(None):
                return tf.no_op(name=MARKER)
