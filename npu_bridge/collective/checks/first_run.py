"""Runs checks before a session runs certain operators, such as collectives, for the first time.

Such checks need separate runs, for example to read all variables, and must add nothing to the training step. So they
are made outside of the session's graph. Sessions are watched from the first added check on; checks are only added with
several ranks.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any, Callable, TypeVar

import tensorflow as tf

from npu_bridge.base import kept_in_graph
from npu_bridge.base.session_wrapper import SessionEngine, add_engine
from npu_bridge.collective import wire_names
from npu_bridge.graph.loop import COLLECTIVE_TYPES
from npu_bridge.graph.run import SessionRun, run_of, run_of_call

_NAME_ATTRIBUTE = "_npu_bridge_transfer"  # set by `transfer_tensors.prevent_op_merging`; copies of an operator keep it


class FirstRunCheck:
    """A check to make before some runs of sessions, by default before runs with certain collectives.

    Args:
      transfers: full names of collectives, from `wire_names.record_collective_names`; also an attribute, to which
        more are added.
    """

    def __init__(self, transfers: Iterable[str] = ()):
        self.transfers = set(transfers)

    def is_due(self, session: tf.compat.v1.Session) -> bool:
        """Returns whether the check must still be made in a session; called at each run of the session."""
        raise NotImplementedError

    def is_needed_for(self, run: SessionRun) -> bool:
        """Returns whether the check must be made before this run; called while the check is due."""
        return bool(self.transfers & collectives_in(run))

    def make_check(self, session: tf.compat.v1.Session, run: SessionRun) -> list[tf.Tensor] | None:
        """Makes the check before a run. A subclass can run the session here with `run_without_engines`.

        Returns:
          Tensors that this run must also fetch, whose values `receive` gets. None: `receive` is not called.
        """

    def receive(self, fetched: list, fed: list) -> None:
        """Gets the values fetched for this check and the fed values, after a run; not called for prepared callables."""


_Kind = TypeVar("_Kind", bound=FirstRunCheck)
_CHECKS_OF_ALL: dict[Any, FirstRunCheck] = {}  # checks of all graphs, by key
_COLLECTION = ("npu_bridge", "first_run_checks")
_TRANSFERS: weakref.WeakKeyDictionary[SessionRun, set[str]] = weakref.WeakKeyDictionary()


def find_or_add_check(graph: tf.Graph | None, key: Any, make: Callable[[], _Kind]) -> _Kind:
    """Returns the check with a key, and adds it at the first call.

    Args:
      graph: the graph whose sessions are checked; None for all graphs.
      key: identifies the check among the checks of the graph.
      make: returns the new check; called at the first call with this key.
    """
    checks: dict = _CHECKS_OF_ALL if graph is None else kept_in_graph.find_or_make(graph, _COLLECTION, dict)
    if key not in checks:
        _add_checking_engine()
        checks[key] = make()
    return checks[key]


@functools.cache
def _add_checking_engine() -> None:
    add_engine(None, _CheckingEngine())


class _CheckingEngine(SessionEngine):
    """Wraps the runs of a session, and makes the pending checks before a run."""

    def execute(self, session, request):
        receiving = _make_due_checks(session, lambda: run_of(session.graph, request.requested_elements, request.fed))
        along = [tensor for _, tensors in receiving for tensor in tensors]
        results = self.inner.execute(session, request._replace(fetches=[*request.fetches, *along]))
        for check, tensors in reversed(receiving):
            own = len(results) - len(tensors)
            with wire_names.use_label(session.graph):
                check.receive(results[own:], list(request.feeds.values()))
            results = results[:own]
        return results

    def make_callable(self, session, fetches, feed_list, accept_options):
        made = self.inner.make_callable(session, fetches, feed_list, accept_options)
        return _run_with_checks(session, made, lambda: run_of(session.graph, fetches, feed_list))

    def prepare_call(self, session, callable_options):
        made = self.inner.prepare_call(session, callable_options)
        return _run_with_checks(session, made, lambda: run_of_call(session.graph, callable_options))

    def set_up_partial_run(self, session, fetches, feeds):
        _make_due_checks(session, lambda: run_of(session.graph, fetches, feeds))
        return self.inner.set_up_partial_run(session, fetches, feeds)


def _run_with_checks(session, function, find_run):
    """Wraps a function with which TF 1 Keras runs a session; the new function first makes the checks that are due."""

    def run(*arguments, **keywords):
        _make_due_checks(session, find_run)
        return function(*arguments, **keywords)

    return run


def _make_due_checks(session, find_run):
    """Makes the checks that are due before a run; returns those that need fetched values, each with its tensors."""
    checks = [*_CHECKS_OF_ALL.values(), *kept_in_graph.find_or_make(session.graph, _COLLECTION, dict).values()]
    due = [check for check in checks if check.is_due(session)]
    run = find_run() if due else None
    receiving: list[tuple[FirstRunCheck, list[tf.Tensor]]] = []
    for check in due:
        if check.is_needed_for(run):
            with wire_names.use_label(session.graph):
                tensors = check.make_check(session, run)
            receiving += [] if tensors is None else [(check, tensors)]
    return receiving


def collectives_in(run: SessionRun) -> set[str]:
    """Returns the full names of the collectives in a run."""
    if run not in _TRANSFERS:
        nodes = [op.node_def for op in run.ops if op.type.startswith(COLLECTIVE_TYPES)]
        _TRANSFERS[run] = {node.attr[_NAME_ATTRIBUTE].s.decode() for node in nodes if _NAME_ATTRIBUTE in node.attr}
    return _TRANSFERS[run]
