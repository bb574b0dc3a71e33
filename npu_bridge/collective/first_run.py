"""Runs a check right before a session first runs certain collectives, when all ranks are about to run them.

Sessions are looked at from outside, because what must be done takes runs of its own (reading all variables, say), and
nothing is to be added to the step that trains. The class of all sessions is changed when the first check is added,
which happens with several ranks only.
"""

from __future__ import annotations

import abc
import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Callable

import tensorflow as tf

from npu_bridge.graph.operators import computed_ops
from npu_bridge.tf_internals.sessions import SessionMethods, session_methods, set_session_methods

_MARK = "_npu_bridge_transfer"  # set by `horovod_tensors.prevent_merging`; copies of an operator keep it


class Check(abc.ABC):
    """Something to do before transfers of one graph run.

    Attributes:
      transfers: full names of these transfers, as `wire_names.noted` gives them.
    """

    def __init__(self):
        self.transfers: set[str] = set()

    @abc.abstractmethod
    def is_due(self, session: tf.compat.v1.Session) -> bool:
        """Whether there is anything to do in a session; asked at each of its runs."""

    @abc.abstractmethod
    def act(self, session: tf.compat.v1.Session) -> None:
        """Does it. May run the session with `run_quietly`."""


class _Graph:
    """The checks of one graph, and which runs reach none of their transfers."""

    def __init__(self):
        self.checks: list[Check] = []
        self.elsewhere: set[tuple] = set()


_GRAPHS: weakref.WeakKeyDictionary[tf.Graph, _Graph] = weakref.WeakKeyDictionary()


def add_check(graph: tf.Graph, check: Check) -> None:
    """Has a check made before each run of a session that reaches its transfers, while the check is due."""
    _watch_sessions()
    _GRAPHS.setdefault(graph, _Graph()).checks.append(check)


def run_quietly(session: Any, fetches: Sequence = (), targets: Sequence = (), feeds: dict | None = None) -> list:
    """Runs a session past its hooks and recorders.

    Args:
      session: the session.
      fetches, targets: tensors to fetch and operators to run.
      feeds: values by tensor.
    Returns:
      The values of `fetches`.
    """
    by_reference = {tensor.ref(): value for tensor, value in (feeds or {}).items()}
    return _watch_sessions()(session, None, list(targets), list(fetches), by_reference, None, None)


@functools.cache
def _watch_sessions() -> Callable:
    """Changes the class of all sessions, once; gives what ran them before."""
    do_run, make, make_from_options = session_methods()

    @functools.wraps(do_run)
    def checked_run(self, handle, target_list, fetch_list, feed_dict, options, run_metadata):
        if _is_anything_due(self):
            ops = [*target_list, *(tensor.op for tensor in fetch_list)]
            _act(self, ops, {reference.deref().name for reference in feed_dict or ()})
        return do_run(self, handle, target_list, fetch_list, feed_dict, options, run_metadata)

    @functools.wraps(make)
    def make_checked(self, fetches, feed_list=None, accept_options=False):
        flat = tf.nest.flatten(fetches, expand_composites=True)
        return _checked(self, make(self, fetches, feed_list, accept_options), flat, feed_list or ())

    @functools.wraps(make_from_options)
    def make_checked_from_options(self, options):
        asked = [*options.fetch, *options.target, *(pair.from_tensor for pair in options.tensor_connection)]
        return _checked(self, make_from_options(self, options), asked, options.feed)

    set_session_methods(SessionMethods(checked_run, make_checked, make_checked_from_options))
    return do_run


def _checked(session, function, asked, fed):
    """A function that runs a session, with the checks before it; TF 1 Keras trains by such functions."""

    def run(*arguments, **keywords):
        if _is_anything_due(session):
            elements = [session.graph.as_graph_element(element) for element in asked]
            names = {session.graph.as_graph_element(element).name for element in fed}
            ops = [element if isinstance(element, tf.Operation) else element.op for element in elements]
            _act(session, ops, names)
        return function(*arguments, **keywords)

    return run


def _is_anything_due(session):
    kept = _GRAPHS.get(session.graph)
    return kept is not None and any(check.is_due(session) for check in kept.checks)


def _act(session, ops, fed):
    kept = _GRAPHS[session.graph]
    due = [check for check in kept.checks if check.is_due(session)]
    key = (frozenset(op.name for op in ops), frozenset(fed), *(len(check.transfers) for check in kept.checks))
    if key in kept.elsewhere:
        return
    reached = _transfers_before(ops, fed)
    if not any(check.transfers & reached for check in due):
        kept.elsewhere.add(key)
    for check in due:
        if check.transfers & reached:
            check.act(session)


def _transfers_before(ops: Iterable[tf.Operation], fed: set[str]) -> set[str]:
    """The marks of the transfers that a run of these operators takes part in."""
    found = set()
    for op in computed_ops(ops, fed):
        if op.type.startswith("Horovod"):
            mark = op.node_def.attr[_MARK].s if _MARK in op.node_def.attr else b""
            found.add(mark.decode())
    return found
