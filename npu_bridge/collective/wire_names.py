"""Gives collectives names that are the same on every rank, and different for each training of a process.

Horovod matches collectives by the full names of their operators, in whatever order ranks run them. If two models of a
process shared names, ranks that run the models in different orders, perhaps in threads, would average the gradients of
one model with gradients of the other. So graphs and optimizers are numbered, in the order in which a thread makes them;
names for the first graph or optimizer have no number.

In a graph, all collectives are built in one scope at its root, in whatever name scopes the ranks build them.
Collectives of the same name are numbered in the order in which they are built. Branches of a `tf.cond` and bodies of a
`tf.while_loop` count as parts of the graph around them. When they run, scopes are put in front of the names of their
operators. Horovod ignores these scopes: it keeps only what follows the last slash. For this reason names contain none.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Callable

import tensorflow as tf

from npu_bridge.base import environment
from npu_bridge.base.tf_internals.callers import is_building_evaluation, model_in_training
from npu_bridge.base.tf_internals.graphs import is_branch_or_body
from npu_bridge.collective.thread_labels import thread_label

_SCOPE = "transfers/"
# The label for graphs that train nothing; perhaps only rank 0 builds them.
UNTRAINED = "untrained."

_numbers: collections.Counter = collections.Counter()
_lock = threading.Lock()
_in_force: contextvars.ContextVar[str | tf.Graph | None] = contextvars.ContextVar(
    "label of all transfers in the block, or the graph that gives the label; None outside of blocks", default=None
)
_is_restoring: contextvars.ContextVar[bool] = contextvars.ContextVar("optimizers are restored", default=False)
_of_owner: contextvars.ContextVar[str] = contextvars.ContextVar("label of an optimizer's transfers", default="")


class CollectivesOwner:
    """The owner of collectives: an optimizer or an Estimator, whose label keeps its collectives apart from others.

    An owner gets its number when it is made. An owner restored from a file gets its number later, because perhaps only
    rank 0 has read the file; `small_values.share_label` gives it the label that it has on the other ranks.

    Args:
      is_counted: whether the owner runs collectives. Owners without collectives get no number, because ranks can make
        different numbers of such owners.
    Attributes:
      given_label: the label; None for an owner restored from a file that has not used its label yet.
    """

    def __init__(self, is_counted: bool = True):
        self.given_label = None if _is_restoring.get() else _new_owner_label() if is_counted else ""

    @property
    def label(self) -> str:
        """The label in front of the names of this owner's collectives."""
        if self.given_label is None:
            self.given_label = _next_label("restored", _numbers)
        return self.given_label


def assign_collectives_to_owner(method: Callable) -> Callable:
    """Decorates a method: its collectives belong to the `CollectivesOwner` in the object's attribute `transfers`."""

    @functools.wraps(method)
    def named(self, *arguments, **keywords):
        with _set_in_block(_of_owner, self.transfers.label):
            return method(self, *arguments, **keywords)

    return named


class _GraphNames:
    """The names of the collectives in one graph."""

    def __init__(self):
        self.label: str | None = None
        self.owners: collections.Counter = collections.Counter()
        self.counts: collections.Counter = collections.Counter()
        self.series: collections.Counter = collections.Counter()
        self.given: list[str] = []


_NAMES: weakref.WeakKeyDictionary[tf.Graph, _GraphNames] = weakref.WeakKeyDictionary()
_OWNERS: weakref.WeakKeyDictionary[Any, CollectivesOwner] = weakref.WeakKeyDictionary()


def mark_optimizers_as_restored() -> contextlib.AbstractContextManager[None]:
    """Counts the optimizers that are made inside the block as restored from a file."""
    return _set_in_block(_is_restoring, True)


def set_owner(optimizer: Any, owner: CollectivesOwner) -> None:
    """Stores the owner of a Keras optimizer's collectives, for callbacks of the model that this optimizer trains."""
    _OWNERS[optimizer] = owner


def owner_of(optimizer: Any) -> CollectivesOwner | None:
    """Returns the owner that `set_owner` stored for a Keras optimizer, or for the one inside Keras' loss scaling."""
    while optimizer is not None and optimizer not in _OWNERS:
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return None if optimizer is None else _OWNERS[optimizer]


def current_collectives_label() -> str:
    """Returns the label in front of the names of the caller's collectives; each training has its own label."""
    in_force = _in_force.get()
    if in_force is not None:
        return in_force if isinstance(in_force, str) else label_of_graph(in_force)
    graph = _outermost_graph()
    own = _of_owner.get() or (_label_of_model() if graph is None else "")
    return own if graph is None else label_of_graph(graph) + own


def label_of_graph(graph: tf.Graph) -> str:
    """Returns the label of the collectives in a TF 1 graph."""
    names, in_force = _graph_names_of(graph), _in_force.get()
    if names.label is None and isinstance(in_force, str):
        names.label = in_force
    if names.label is None:
        names.label = UNTRAINED if is_building_evaluation() else _next_label("training", _numbers)
    return names.label


def use_label(label_or_graph: str | tf.Graph) -> contextlib.AbstractContextManager[None]:
    """Gives all collectives inside the block a label: the text `label_or_graph`, or the label of this graph."""
    return _set_in_block(_in_force, label_or_graph)


@contextlib.contextmanager
def _set_in_block(variable, value):
    before = variable.set(value)
    try:
        yield
    finally:
        variable.reset(before)


def graph_numbering_collectives() -> tf.Graph | None:
    """Returns the graph or function being built, in which collectives are numbered; None when executing eagerly."""
    if tf.executing_eagerly():
        return None
    graph = tf.compat.v1.get_default_graph()
    while is_branch_or_body(graph):
        graph = graph.outer_graph
    return graph


def next_collective_name(series: str) -> str:
    """Returns the name of the next collective of a series: numbered in a graph; eagerly, the series' own name."""
    graph = graph_numbering_collectives()
    if graph is None:
        return series
    counts = _graph_names_of(graph).series
    counts[series] += 1
    return f"{series}_{counts[series] - 1}"


def full_collective_name(name: str) -> str:
    """Returns the full name of a collective's operator in its graph."""
    return f"{_SCOPE}{current_collectives_label()}{name}"


@contextlib.contextmanager
def name_collective(stem: str) -> Iterator[dict]:
    """Gives a collective that is built inside the block the same full name on every rank; repeated names get numbers.

    Yields:
      Keywords for the function of Horovod that builds the collective.
    """
    graph, stem = graph_numbering_collectives(), f"{current_collectives_label()}{stem}"
    if graph is None:
        yield {"name": stem}
        return
    names = _graph_names_of(graph)
    names.counts[stem] += 1
    name = stem if names.counts[stem] == 1 else f"{stem}_{names.counts[stem] - 1}"
    names.given.append(_SCOPE + name)
    is_branch = graph is not tf.compat.v1.get_default_graph()
    with tf.compat.v1.name_scope(_SCOPE):
        yield {"name": name, "ignore_name_scope": is_branch}


@contextlib.contextmanager
def record_collective_names() -> Iterator[list]:
    """Yields a list, which the end of the block fills with the full names of the collectives built in the block."""
    graph, names = graph_numbering_collectives(), []
    given = [] if graph is None else _graph_names_of(graph).given
    start = len(given)
    yield names
    names += given[start:]


def names_in_graph(graph: tf.Graph) -> list[str]:
    """Returns the full names of all collectives built in a graph so far."""
    return _graph_names_of(graph).given


def _graph_names_of(graph):
    with _lock:
        return _NAMES.setdefault(graph, _GraphNames())


def _outermost_graph():
    """Returns the TF 1 graph being built, also if a function inside it is being built; None when executing eagerly."""
    with tf.init_scope():
        return graph_numbering_collectives()


def _label_of_model():
    """Returns the label of the optimizer of the Keras model that is being trained, or ""."""
    owner = owner_of(getattr(model_in_training(), "optimizer", None))
    return "" if owner is None else owner.label


def _new_owner_label():
    graph = _outermost_graph()
    return (
        _next_label("training", _numbers) if graph is None else _next_label("optimizer", _graph_names_of(graph).owners)
    )


def _next_label(series, numbers):
    """Returns a new label, equal on all ranks; "" for the first label of the main thread."""
    if environment.is_flag_on("HOROVOD_ELASTIC"):  # ranks that join later would count from the beginning
        return ""
    thread = thread_label()
    series += thread
    with _lock:
        number = numbers[series]
        numbers[series] += 1
    return f"{series}_{number}." if number or thread or series == "restored" else ""
