"""Runs checks before a session runs certain operators, such as collectives, for the first time.

Such checks need runs of their own, for example to read all variables, and must add nothing to the step that trains. So
they are made outside of the session's graph. Sessions are watched from the first added check on, which only happens
with several ranks.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any, Callable, TypeVar

import tensorflow as tf

from npu_bridge.base.session_wrapper import SessionEngine, add_engine
from npu_bridge.collective import wire_names
from npu_bridge.graph.loop import COLLECTIVE_TYPES
from npu_bridge.graph.run import Run, run_of, run_of_call

_MARK = "_npu_bridge_transfer"  # set by `transfer_tensors.prevent_merging`; copies of an operator keep it


class Check:
    """Something to do before runs of sessions, by default before those that take part in certain transfers.

    Args:
      transfers: full names of transfers, as `wire_names.noted` gives them; also an attribute, to which more are added.
    """

    def __init__(self, transfers: Iterable[str] = ()):
        self.transfers = set(transfers)

    def is_due(self, session: tf.compat.v1.Session) -> bool:
        """Returns whether there is anything to do in a session; asked at each of its runs."""
        raise NotImplementedError

    def concerns(self, run: Run) -> bool:
        """Returns whether this run needs the check first; asked while the check is due."""
        return bool(self.transfers & transfers_of(run))

    def act(self, session: tf.compat.v1.Session, run: Run) -> list[tf.Tensor] | None:
        """Makes the check before this run. Can run the session with `run_quietly`.

        Returns:
          Tensors to fetch along with the run, whose values `see` then gets; None if there is nothing to see.
        """

    def see(self, fetched: list, fed: list) -> None:
        """Gets these values after the run, and the fed values; not called in calls that were prepared before."""


_Kind = TypeVar("_Kind", bound=Check)
_CHECKS_OF_ALL: dict[Any, Check] = {}  # by key, as those of each graph
_CHECKS: weakref.WeakKeyDictionary[tf.Graph, dict[Any, Check]] = weakref.WeakKeyDictionary()
_TRANSFERS: weakref.WeakKeyDictionary[Run, set[str]] = weakref.WeakKeyDictionary()


def check_of(graph: tf.Graph | None, key: Any, make: Callable[[], _Kind]) -> _Kind:
    """Returns the check for a key, which is made before each run of a session that it concerns, while it is due.

    Args:
      graph: of the sessions; None for all graphs.
      key: identifies the check among those of the graph.
      make: makes the check at the first call with this key.
    """
    checks: dict = _CHECKS_OF_ALL if graph is None else _CHECKS.setdefault(graph, {})
    if key not in checks:
        _watch_sessions()
        checks[key] = make()
    return checks[key]


@functools.cache
def _watch_sessions() -> None:
    add_engine(None, _Audit())


class _Audit(SessionEngine):
    """Makes the checks that are due before runs of all sessions."""

    def execute(self, session, request):
        to_see = _check(session, lambda: run_of(session.graph, request.asked, request.fed))
        along = [tensor for _, tensors in to_see for tensor in tensors]
        results = self.inner.execute(session, request._replace(fetches=[*request.fetches, *along]))
        for check, tensors in reversed(to_see):
            own = len(results) - len(tensors)
            with wire_names.labelled(session.graph):
                check.see(results[own:], list(request.feeds.values()))
            results = results[:own]
        return results

    def make_callable(self, session, fetches, feed_list, accept_options):
        made = self.inner.make_callable(session, fetches, feed_list, accept_options)
        return _checked(session, made, lambda: run_of(session.graph, fetches, feed_list))

    def prepare_call(self, session, callable_options):
        made = self.inner.prepare_call(session, callable_options)
        return _checked(session, made, lambda: run_of_call(session.graph, callable_options))

    def set_up_partial_run(self, session, fetches, feeds):
        _check(session, lambda: run_of(session.graph, fetches, feeds))
        return self.inner.set_up_partial_run(session, fetches, feeds)


def _checked(session, function, find_run):
    """Returns a function that makes the checks and runs a session; TF 1 Keras trains by such functions."""

    def run(*arguments, **keywords):
        _check(session, find_run)
        return function(*arguments, **keywords)

    return run


def _check(session, find_run):
    """Makes the checks that are due; returns those with something to see, each with the tensors to fetch for it."""
    checks = [*_CHECKS_OF_ALL.values(), *_CHECKS.get(session.graph, {}).values()]
    due = [check for check in checks if check.is_due(session)]
    run = find_run() if due else None
    to_see: list[tuple[Check, list[tf.Tensor]]] = []
    for check in due:
        if check.concerns(run):
            with wire_names.labelled(session.graph):
                tensors = check.act(session, run)
            to_see += [] if tensors is None else [(check, tensors)]
    return to_see


def transfers_of(run: Run) -> set[str]:
    """Returns the marks of the transfers that a run takes part in."""
    if run not in _TRANSFERS:
        nodes = [op.node_def for op in run.ops if op.type.startswith(COLLECTIVE_TYPES)]
        _TRANSFERS[run] = {node.attr[_MARK].s.decode() for node in nodes if _MARK in node.attr}
    return _TRANSFERS[run]
