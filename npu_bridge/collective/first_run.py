"""Runs checks before a session runs certain operators, such as collectives, for the first time.

Sessions are looked at from outside, because what must be done takes runs of its own (reading all variables, say), and
nothing is to be added to the step that trains. The class of all sessions is changed when the first check is added,
which happens with several ranks only.
"""

from __future__ import annotations

import abc
import functools
import weakref

import tensorflow as tf

from npu_bridge.base.tf_internals.sessions import put_around_sessions
from npu_bridge.collective import wire_names
from npu_bridge.graph.run import Run, run_of

_MARK = "_npu_bridge_transfer"  # set by `horovod_tensors.prevent_merging`; copies of an operator keep it


class Check(abc.ABC):
    """Something to do before runs of sessions."""

    @abc.abstractmethod
    def is_due(self, session: tf.compat.v1.Session) -> bool:
        """Whether there is anything to do in a session; asked at each of its runs."""

    @abc.abstractmethod
    def concerns(self, run: Run) -> bool:
        """Whether it is to be done before this run; asked while it is due."""

    @abc.abstractmethod
    def act(self, session: tf.compat.v1.Session, run: Run) -> None:
        """Does it before this run. May run the session with `run_quietly`."""

    def fetched_along(self, session: tf.compat.v1.Session, run: Run) -> list[tf.Tensor]:
        """Tensors whose values are to be fetched with a run that `act` was called for; by default none."""
        return []

    def see(self, fetched: list, fed: list) -> None:
        """Gets those values after the run, and those that it was fed; not in calls that were prepared before."""
        return


class CheckOfTransfers(Check):
    """Something to do before transfers of one graph run, when all ranks are about to run them.

    Attributes:
      transfers: full names of these transfers, as `wire_names.noted` gives them.
    """

    def __init__(self):
        self.transfers: set[str] = set()

    def concerns(self, run):
        return bool(self.transfers & _transfers_of(run))


_CHECKS_OF_ALL: list[Check] = []
_CHECKS: weakref.WeakKeyDictionary[tf.Graph, list[Check]] = weakref.WeakKeyDictionary()
_TRANSFERS: weakref.WeakKeyDictionary[Run, set[str]] = weakref.WeakKeyDictionary()


def add_check(graph: tf.Graph | None, check: Check) -> None:
    """Has a check made before each run of a session that it concerns, while it is due; None is for every graph."""
    _watch_sessions()
    (_CHECKS_OF_ALL if graph is None else _CHECKS.setdefault(graph, [])).append(check)


@functools.cache
def _watch_sessions() -> None:
    """Changes the class of all sessions, once."""

    def checked_run(do_run, session, handle, targets, fetches, feeds, options, metadata):
        acted = _check(session, [*targets, *fetches], [reference.deref() for reference in feeds or ()])
        along = [tensor for _, tensors in acted for tensor in tensors]
        results = do_run(session, handle, targets, [*fetches, *along], feeds, options, metadata)
        for check, tensors in reversed(acted):
            own = len(results) - len(tensors)
            with wire_names.labelled(session.graph):
                check.see(results[own:], list((feeds or {}).values()))
            results = results[:own]
        return results

    def make_checked(make, session, fetches, feed_list=None, accept_options=False):
        return _checked(session, make(session, fetches, feed_list, accept_options), fetches, feed_list)

    def make_checked_from_options(make, session, options):
        asked = [*options.fetch, *options.target, *(pair.from_tensor for pair in options.tensor_connection)]
        return _checked(session, make(session, options), asked, options.feed)

    put_around_sessions(
        do_run=checked_run, make_callable=make_checked, make_callable_from_options=make_checked_from_options
    )


def _checked(session, function, fetches, feeds):
    """A function that runs a session, with the checks before it; TF 1 Keras trains by such functions."""

    def run(*arguments, **keywords):
        _check(session, fetches, feeds)
        return function(*arguments, **keywords)

    return run


def _check(session, fetches, feeds):
    """Makes the checks that are due, and gives them, each with the tensors that it wants to see."""
    acted: list[tuple[Check, list[tf.Tensor]]] = []
    due = [check for check in (*_CHECKS_OF_ALL, *_CHECKS.get(session.graph, ())) if check.is_due(session)]
    if due:
        run = run_of(session.graph, fetches, feeds)
        for check in due:
            if check.concerns(run):
                with wire_names.labelled(session.graph):
                    check.act(session, run)
                acted.append((check, check.fetched_along(session, run)))
    return acted


def _transfers_of(run: Run) -> set[str]:
    """The marks of the transfers that a run takes part in."""
    if run not in _TRANSFERS:
        nodes = [op.node_def for op in run.ops if op.type.startswith("Horovod")]
        _TRANSFERS[run] = {node.attr[_MARK].s.decode() for node in nodes if _MARK in node.attr}
    return _TRANSFERS[run]
