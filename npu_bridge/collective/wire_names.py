"""Gives collective operations names that are the same on every rank, whatever name scopes ranks build them in.

Horovod matches transfers by the full names of their operators. So all of them are built in one scope at the root of
their graph, and those of the same name are numbered in the order in which they were built. Branches of a `tf.cond` and
bodies of a `tf.while_loop` count with the graph around them: when that runs, what is built in them has its scopes in
front of its name, so Horovod is told to ignore scopes there.
"""

from __future__ import annotations

import collections
import contextlib
import weakref
from collections.abc import Iterator

import tensorflow as tf

from npu_bridge.base.tf_internals.graphs import is_branch_or_body

_SCOPE = "transfers/"


class _Names:
    """The names given in one graph."""

    def __init__(self):
        self.counts: collections.Counter = collections.Counter()
        self.rows: collections.Counter = collections.Counter()
        self.given: list[str] = []


_NAMES: weakref.WeakKeyDictionary[tf.Graph, _Names] = weakref.WeakKeyDictionary()


def counting_graph() -> tf.Graph | None:
    """The graph or function being built, whose transfers are numbered together; None when executing eagerly."""
    if tf.executing_eagerly():
        return None
    graph = tf.compat.v1.get_default_graph()
    while is_branch_or_body(graph):
        graph = graph.outer_graph
    return graph


def next_in_row(row: str) -> str:
    """The name of the next transfer of a row that is numbered through in its graph; eagerly, that of the row."""
    graph = counting_graph()
    if graph is None:
        return row
    rows = _NAMES.setdefault(graph, _Names()).rows
    rows[row] += 1
    return f"{row}_{rows[row] - 1}"


def full(name: str) -> str:
    """The name that a transfer's operator has in its graph."""
    return _SCOPE + name


@contextlib.contextmanager
def placed(stem: str) -> Iterator[dict]:
    """Inside, a transfer is built where its name is the same on every rank; a second one of that name gets a number.

    Yields:
      Keywords for the function of Horovod that builds it.
    """
    graph = counting_graph()
    if graph is None:
        yield {"name": stem}
        return
    names = _NAMES.setdefault(graph, _Names())
    names.counts[stem] += 1
    name = stem if names.counts[stem] == 1 else f"{stem}_{names.counts[stem] - 1}"
    names.given.append(full(name))
    is_branch = graph is not tf.compat.v1.get_default_graph()
    with tf.compat.v1.name_scope(_SCOPE):
        yield {"name": name, "ignore_name_scope": is_branch}


@contextlib.contextmanager
def noted() -> Iterator[list]:
    """Yields a list that holds, afterwards, the full names of the transfers built inside, for `first_run`."""
    graph, names = counting_graph(), []
    given = [] if graph is None else _NAMES.setdefault(graph, _Names()).given
    start = len(given)
    yield names
    names += given[start:]
