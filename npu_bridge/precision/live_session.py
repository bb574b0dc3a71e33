"""Sessions whose executors are built in the precision of the moment.

TensorFlow keeps one executor for each set of fetches and targets, and builds it at the first run that asks for it. So
a set that has not been built in the wanted precision is built ahead of its run, with the rewriter's lists in the
environment just for that time. Another precision for a set that is built already needs another set: the same one and
an operator that does nothing. Nothing else changes in the session, which keeps its variables, iterators and the state
of its random operators.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Callable, NamedTuple

import tensorflow as tf

from npu_bridge.options import environment
from npu_bridge.options.errors import say_once
from npu_bridge.precision.modes import Policy
from npu_bridge.precision.policy import Precision
from npu_bridge.precision.run_kind import RunKind, kind_of
from npu_bridge.tf_internals.graphs import opened_for_changes
from npu_bridge.tf_internals.sessions import content_of, is_remote, run_options_buffer

MARKER = "npu_bridge_original_precision"
# No session has so many thread pools. A direct session of TensorFlow 2.15 builds the executor of a run, keeps it, and
# only then refuses a pool it does not have.
_MISSING_POOL = 2**31 - 1


class Build(NamedTuple):
    """An executor that was built: under which policy, whether its run trains, and how long it took."""

    policy: Policy
    is_training: bool
    secs: float


def attach(session: tf.compat.v1.Session, precision: Precision) -> None:
    """Lets a session follow the precision of a training.

    Args:
      session: a session made with settings that `Precision.prepare` has seen; its class becomes a subclass of what it
        was. A session that has run something keeps those executors as they are.
      precision: of the training; a session follows one.
    Graph: adds one operator that does nothing, also to a finalized graph, when the precision can switch.
    """
    if not precision.is_active or isinstance(session, _PreciseSession):
        return
    if is_remote(session):
        say_once(logging.WARNING, "precision: sessions on a remote TensorFlow server keep the dtypes of their graph.")
        return
    session._npu_bridge_precision = _Executors(session.graph, precision)
    session._npu_bridge_precision.round_new_operators()
    session.__class__ = type(type(session).__name__, (_PreciseSession, type(session)), {})


def precision_of_session(session: tf.compat.v1.Session) -> Precision | None:
    """The precision an attached session follows; None for other sessions."""
    return session._npu_bridge_precision.precision if isinstance(session, _PreciseSession) else None


def builds_of(session: tf.compat.v1.Session) -> list[Build]:
    """The executors an attached session has built so far, in order; empty for other sessions."""
    return list(session._npu_bridge_precision.builds) if isinstance(session, _PreciseSession) else []


def policy_of_last_step(session: tf.compat.v1.Session) -> Policy | None:
    """The policy the latest run that trains followed; None before the first, and for sessions not attached."""
    return session._npu_bridge_precision.last_training if isinstance(session, _PreciseSession) else None


@contextlib.contextmanager
def one_decision(session: tf.compat.v1.Session) -> Iterator[None]:
    """Inside, all runs of an attached session that train the same follow the policy of the first; made for loops.

    Ranks: the decision is joint as ever, but taken once.
    """
    if not isinstance(session, _PreciseSession):
        yield
        return
    executors = session._npu_bridge_precision
    executors.decided = {}
    try:
        yield
    finally:
        executors.decided = None


class _PreciseSession:
    """Mixed into a session's class."""

    def _do_run(self, handle, target_list, fetch_list, feed_dict, options, run_metadata):
        if handle is None:
            self._npu_bridge_precision.round_new_operators()
            request = _Request(fetch_list, target_list, feed_dict, options)
            target_list = self._npu_bridge_precision.targets_for(request, self._build)
        return super()._do_run(handle, target_list, fetch_list, feed_dict, options, run_metadata)

    def _build(self, request, target_list):
        with run_options_buffer(request.building_options()) as options:
            try:
                super()._do_run(None, target_list, request.fetches, request.feeds, options, None)
            except tf.errors.InvalidArgumentError as error:
                if "inter_op_thread_pool" not in error.message:
                    raise

    def make_callable(self, fetches, feed_list=None, accept_options=False):
        # A callable without a list of feeds would go past `_do_run`.
        return super().make_callable(fetches, [] if feed_list is None else feed_list, accept_options)

    def partial_run_setup(self, fetches, feeds=None):
        self._npu_bridge_precision.round_new_operators()
        with self._npu_bridge_precision.configured():
            return super().partial_run_setup(fetches, feeds)

    def _make_callable_from_options(self, callable_options):
        self._npu_bridge_precision.round_new_operators()
        return _Callable(self._npu_bridge_precision, callable_options, super()._make_callable_from_options)


class _Request:
    """What a session was asked to run, as `_do_run` gets it."""

    def __init__(self, fetches: list, targets: list, feeds: Mapping, options: Any):
        self.fetches, self.targets, self.feeds = fetches, targets, feeds
        self._debug_options = None
        if options is not None:
            given = tf.compat.v1.RunOptions.FromString(content_of(options))
            self._debug_options = given.debug_options  # the only run options an executor is built for

    @property
    def key(self) -> tuple:
        """What tells executors apart."""
        debug = self._debug_options.SerializeToString() if self._debug_options is not None else b""
        fetches = tuple(tensor.name for tensor in self.fetches)
        return fetches, tuple(op.name for op in self.targets), tuple(sorted(self._fed())), debug

    def kind(self, graph: tf.Graph) -> RunKind:
        """What the run does."""
        return kind_of(graph, [*(tensor.op for tensor in self.fetches), *self.targets], self._fed())

    def building_options(self) -> Any:
        """Run options under which the executor is built and nothing runs."""
        options = tf.compat.v1.RunOptions(inter_op_thread_pool=_MISSING_POOL)
        if self._debug_options is not None:
            options.debug_options.CopyFrom(self._debug_options)
        return options

    def _fed(self) -> Iterable[str]:
        return [reference.deref().name for reference in self.feeds]


class _Callable:
    """What `_make_callable_from_options` gives: here each call follows the precision of the moment.

    TF 1 Keras trains by such callables.
    """

    def __init__(self, executors: _Executors, options: Any, make: Callable[[Any], Callable]):
        self._executors, self._options, self._make = executors, options, make
        self._made: dict[Policy, Callable] = {}
        find = executors.graph.as_graph_element
        names = [*options.fetch, *options.target, *(pair.from_tensor for pair in options.tensor_connection)]
        asked = [element if isinstance(element, tf.Operation) else element.op for element in map(find, names)]
        self._kind = kind_of(
            executors.graph, asked, [*options.feed, *(pair.to_tensor for pair in options.tensor_connection)]
        )
        if not self._kind.is_training:
            self._for(executors.policy_of(self._kind))  # so that what is wrong with it is said now

    def __call__(self, *arguments, **keywords):
        return self._for(self._executors.policy_of(self._kind))(*arguments, **keywords)

    def _for(self, policy):
        with self._executors.lock:
            if policy not in self._made:
                self._made[policy] = self._executors.build(self._kind, policy, self._make_with)
            return self._made[policy]

    def _make_with(self, more_targets):
        options = type(self._options)()
        options.CopyFrom(self._options)
        options.target.extend(op.name for op in more_targets)
        return self._make(options)


class _Executors:
    """The executors of one session."""

    def __init__(self, graph: tf.Graph, precision: Precision):
        self.builds: list[Build] = []
        self.last_training: Policy | None = None
        self.decided: dict[frozenset, Policy] | None = None  # by what is trained, while a decision is kept
        self.graph = graph
        self.lock = threading.RLock()
        self.precision = precision
        self._marker = _marker(graph) if precision.switch is not None else None
        self._kinds: dict[tuple, RunKind] = {}
        self._targets: dict[tuple, list[tf.Operation]] = {}

    def targets_for(self, request: _Request, build: Callable[[_Request, list], Any]) -> list[tf.Operation]:
        """The targets with which a run gets the executor it should have, which is built if need be."""
        key = request.key
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = request.kind(self.graph)
        policy = self.policy_of(kind)

        def build_with(more_targets):
            targets = [*request.targets, *more_targets]
            build(request, targets)
            return targets

        with self.lock:
            if (key, policy) not in self._targets:
                self._targets[key, policy] = self.build(kind, policy, build_with)
            return self._targets[key, policy]

    def round_new_operators(self) -> None:
        """Changes operators that the session has not seen yet; TensorFlow would ignore a later change."""
        with self.lock:
            self.precision.round_single_values(self.graph)

    def policy_of(self, kind: RunKind) -> Policy:
        """The policy of a run that is about to start. May wait for other ranks, so not under the lock."""
        decided = self.decided if self.decided is not None and kind.is_training else {}
        policy = decided.get(kind.trained)
        if policy is None:
            policy = decided[kind.trained] = self.precision.policy_of_run(kind)
        if kind.is_training:
            self.last_training = policy
        return policy

    def build(self, kind: RunKind, policy: Policy, build_with: Callable[[list[tf.Operation]], Any]) -> Any:
        """Builds an executor under a policy.

        Args:
          kind, policy: of the run.
          build_with: builds it with some targets beside its own, and gives what is returned.
        """
        precision = self.precision
        is_switched = precision.switch is not None and kind.is_training and policy is not precision.low
        more_targets = [*precision.kept_ops(policy, kind), *([self._marker] if is_switched else ())]
        with self._lists_of(policy):
            start = time.perf_counter()
            built = build_with(more_targets)
            secs = time.perf_counter() - start
        if is_switched and not any(build.is_training and build.policy == policy for build in self.builds):
            precision.switch.report(secs)
        self.builds.append(Build(policy, kind.is_training, secs))
        return built

    def configured(self):
        """A context manager: executors built inside are in the configured precision."""
        return self._lists_of(self.precision.configured)

    def _lists_of(self, policy):
        return environment.temporarily(functools.partial(self.precision.variables, policy, self.graph))


def _marker(graph: tf.Graph) -> tf.Operation:
    """The operator that does nothing; made once in a graph."""
    try:
        return graph.get_operation_by_name(MARKER)
    except KeyError:
        with opened_for_changes(graph), graph.as_default(), tf.name_scope(""), tf.control_dependencies(None):
            with tf.device(None):
                return tf.no_op(name=MARKER)
