"""Gives collective operations names that are the same on every rank, and that belong to one training each.

Horovod matches collectives by the full names of their operators, in whatever order ranks run them. So a process that
trains two models needs two sets of names: ranks that run the models in another order, perhaps in threads, would average
the gradients of one model with those of the other. Graphs and optimizers are therefore numbered, in the order in which
a thread makes them; the names of the first have no number.

In a graph all collectives are built in one scope at its root, whatever name scopes ranks build them in, and those of
the same name are numbered in the order in which they were built. Branches of a `tf.cond` and bodies of a
`tf.while_loop` count with the graph around them: when they run, the names of their operators get scopes in front, so
Horovod must ignore scopes there. For that reason no part of a name holds a slash.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import re
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from npu_bridge.base import environment
from npu_bridge.base.tf_internals.callers import builds_evaluation, model_in_training
from npu_bridge.base.tf_internals.graphs import is_branch_or_body

_SCOPE = "transfers/"
# The label of graphs that train nothing, which perhaps only rank 0 builds.
UNTRAINED = "untrained."
# Python's default name of a thread: its number, and from Python 3.10 on the name of its function.
_UNNAMED = re.compile(r"Thread-(\d+)(.*)")

_numbers: collections.Counter = collections.Counter()
# Numbers of the threads seen so far, by their function.
_threads: collections.defaultdict[str, set[int]] = collections.defaultdict(set)
_lock = threading.Lock()
_in_force: contextvars.ContextVar[str | tf.Graph | None] = contextvars.ContextVar(
    "whose all transfers are", default=None
)
_is_restoring: contextvars.ContextVar[bool] = contextvars.ContextVar("optimizers are restored", default=False)
_of_owner: contextvars.ContextVar[str] = contextvars.ContextVar("label of an optimizer's transfers", default="")


class Owner:
    """An optimizer or an Estimator, whose collectives are never mistaken for another owner's.

    It is numbered when it is made, except when it is restored: perhaps only rank 0 has read the file.

    Args:
      is_counted: it runs collectives; other owners are not numbered, as a rank can make some for itself.
    """

    def __init__(self, is_counted: bool = True):
        self._label = None if _is_restoring.get() else _label_of_owner() if is_counted else ""

    @property
    def label(self) -> str:
        """Returns the label in front of its collectives' names."""
        if self._label is None:
            self._label = _next_label("restored", _numbers)
        return self._label

    @contextlib.contextmanager
    def transferring(self) -> Iterator[None]:
        """Makes collectives inside the block belong to this owner."""
        before = _of_owner.set(self.label)
        try:
            yield
        finally:
            _of_owner.reset(before)


class _Names:
    """The names given in one graph."""

    def __init__(self):
        self.label: str | None = None
        self.owners: collections.Counter = collections.Counter()
        self.counts: collections.Counter = collections.Counter()
        self.rows: collections.Counter = collections.Counter()
        self.given: list[str] = []


_NAMES: weakref.WeakKeyDictionary[tf.Graph, _Names] = weakref.WeakKeyDictionary()
_OWNERS: weakref.WeakKeyDictionary[Any, Owner] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def restoring() -> Iterator[None]:
    """Marks optimizers made inside the block as restored."""
    before = _is_restoring.set(True)
    try:
        yield
    finally:
        _is_restoring.reset(before)


def set_owner(optimizer: Any, owner: Owner) -> None:
    """Notes the owner of a Keras optimizer's collectives, for callbacks of the model that trains with it."""
    _OWNERS[optimizer] = owner


def label() -> str:
    """Returns the prefix of the names of the caller's collectives; each training of a process has its own."""
    in_force = _in_force.get()
    if in_force is not None:
        return in_force if isinstance(in_force, str) else label_of(in_force)
    graph = _root_graph()
    own = _of_owner.get() or (_of_model() if graph is None else "")
    return own if graph is None else label_of(graph) + own


def label_of(graph: tf.Graph) -> str:
    """Returns the label of the collectives of a TF 1 graph."""
    names, in_force = _names_in(graph), _in_force.get()
    if names.label is None and isinstance(in_force, str):
        names.label = in_force
    if names.label is None:
        names.label = UNTRAINED if builds_evaluation() else _next_label("training", _numbers)
    return names.label


@contextlib.contextmanager
def labelled(whose: str | tf.Graph) -> Iterator[None]:
    """Gives all collectives inside the block this label; a TF 1 graph means its own label, made at first use."""
    before = _in_force.set(whose)
    try:
        yield
    finally:
        _in_force.reset(before)


def counting_graph() -> tf.Graph | None:
    """Returns the graph or function being built, which numbers its collectives; None when executing eagerly."""
    if tf.executing_eagerly():
        return None
    graph = tf.compat.v1.get_default_graph()
    while is_branch_or_body(graph):
        graph = graph.outer_graph
    return graph


def next_in_row(row: str) -> str:
    """Returns the name of the next collective of a row, numbered through in its graph; eagerly, the row's name."""
    graph = counting_graph()
    if graph is None:
        return row
    rows = _names_in(graph).rows
    rows[row] += 1
    return f"{row}_{rows[row] - 1}"


def full(name: str) -> str:
    """Returns the name of a collective's operator in its graph."""
    return f"{_SCOPE}{label()}{name}"


@contextlib.contextmanager
def placed(stem: str) -> Iterator[dict]:
    """Builds a collective where its name is the same on every rank; a second one of that name gets a number.

    Yields:
      Keywords for the function of Horovod that builds it.
    """
    graph, stem = counting_graph(), f"{label()}{stem}"
    if graph is None:
        yield {"name": stem}
        return
    names = _names_in(graph)
    names.counts[stem] += 1
    name = stem if names.counts[stem] == 1 else f"{stem}_{names.counts[stem] - 1}"
    names.given.append(_SCOPE + name)
    is_branch = graph is not tf.compat.v1.get_default_graph()
    with tf.compat.v1.name_scope(_SCOPE):
        yield {"name": name, "ignore_name_scope": is_branch}


@contextlib.contextmanager
def noted() -> Iterator[list]:
    """Yields a list that holds, after the block, the full names of the collectives built inside, for `first_run`."""
    graph, names = counting_graph(), []
    given = [] if graph is None else _names_in(graph).given
    start = len(given)
    yield names
    names += given[start:]


def given_in(graph: tf.Graph) -> list[str]:
    """Returns the full names of all collectives built in a graph so far."""
    return _names_in(graph).given


def _names_in(graph):
    with _lock:
        return _NAMES.setdefault(graph, _Names())


def _root_graph():
    """Returns the TF 1 graph being built, perhaps by a function inside it, or None."""
    with tf.init_scope():
        return counting_graph()


def _of_model():
    """Returns the label of the optimizer of the Keras model being trained, or ""."""
    optimizer = getattr(model_in_training(), "optimizer", None)
    owner = None if optimizer is None else _OWNERS.get(optimizer)
    return "" if owner is None else owner.label


def _label_of_owner():
    graph = _root_graph()
    return _next_label("training", _numbers) if graph is None else _next_label("optimizer", _names_in(graph).owners)


def _next_label(row, numbers):
    """Returns a new label, the same on all ranks; "" for the first one of the main thread."""
    if environment.is_flag_on("HOROVOD_ELASTIC"):  # ranks that join later would count from the beginning
        return ""
    thread = _thread()
    row += thread
    with _lock:
        number = numbers[row]
        numbers[row] += 1
    return f"{row}_{number}." if number or thread or row == "restored" else ""


def _thread():
    """Returns a text that identifies the calling thread, the same on all ranks; "" for the main thread.

    Python numbers threads with default names, and one rank can have started more threads than another. So a thread is
    identified by its place among those that ran the same function.
    """
    thread = threading.current_thread()
    if thread is threading.main_thread():
        return ""
    name = thread.name
    unnamed = _UNNAMED.fullmatch(name)
    if unnamed:
        with _lock:
            for other in filter(None, (_UNNAMED.fullmatch(each.name) for each in threading.enumerate())):
                _threads[other[2]].add(int(other[1]))
            name = f"{sorted(_threads[unnamed[2]]).index(int(unnamed[1]))}{unnamed[2]}"
    return "-" + re.sub(r"\W", "_", name, flags=re.ASCII)
