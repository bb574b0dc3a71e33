"""Counts what ranks exchange in Horovod, and says when an update outside of TF 1 graphs brings nothing together.

Updates of Keras optimizers, in a `fit` or in a loop of one's own, are looked at when the function they are built in is
complete, or when an eager one is about to be made: was anything exchanged since the optimizer was made? Of TF 1 graphs
`gradients/training_apart.py` asks the sessions.

Nothing is added to functions, Horovod is not started for it, and only rank 0 looks and speaks.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from npu_bridge.base import horovod_internals
from npu_bridge.base.after_import import after_import
from npu_bridge.base.terminal import logger
from npu_bridge.base.tf_internals import keras3
from npu_bridge.base.tf_internals.graphs import when_function_is_built
from npu_bridge.base.tf_internals.training import watch_keras_optimizers
from npu_bridge.collective import wire_names
from npu_bridge.collective.apart import run_apart
from npu_bridge.collective.this_process import current, place_in_job

_LOG = logger(__name__)


class Exchanges(NamedTuple):
    """How often values of ranks were brought together.

    Attributes:
      of_any_size: in all.
      of_several: those of more than one number. A single one may be a loss that is averaged for people to see.
    """

    of_any_size: int = 0
    of_several: int = 0


def so_far() -> Exchanges:
    """The exchanges of this process, counted from the first call on; none but on rank 0 of several ranks."""
    if not is_looking():
        return Exchanges()
    _COUNT.watch()
    return _COUNT.exchanges


def watch_updates() -> bool:
    """Has updates of Keras optimizers looked at, if this is rank 0 of several ranks; again is as good as once.

    Returns:
      Whether it is.
    """
    # Variables that contradict each other are told by whoever needs ranks.
    with contextlib.suppress(ValueError):
        if is_looking():
            _watch_once()
            return True
    return False


def note_update(before: Exchanges, variables: Iterable[Any]) -> None:
    """Looks at an update that is about to be made, outside of TF 1 graphs, by an optimizer that exchanges nothing.

    Args:
      before: what `so_far` gave when the optimizer was made.
      variables: those that are updated.
    """
    if not is_looking():
        return
    is_small = all(variable.shape.num_elements() == 1 for variable in variables)

    def tell():
        now = so_far()
        if now.of_several == before.of_several and not (is_small and now.of_any_size > before.of_any_size):
            say_apart()

    function = wire_names.counting_graph()
    if function is None:
        tell()
    elif function.building_function:
        # What is exchanged after the update, weights perhaps, is not there yet.
        when_function_is_built(function, tell)
    # Else it is a TF 1 graph, perhaps a branch of a condition in it, whose sessions are looked at.


@contextlib.contextmanager
def looked_at() -> Iterator[None]:
    """Inside, updates of Keras optimizers are not looked at: whoever calls them knows what they exchange, and when."""
    _WATCH.depth += 1
    try:
        yield
    finally:
        _WATCH.depth -= 1


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """Inside, exchanges do not count: they are about the ranks, such as whether these are alike, and train nothing."""
    before = so_far()
    try:
        yield
    finally:
        if is_looking():
            _COUNT.exchanges = before


def gather_values(own: Any, name: str) -> list:
    """What each rank hands over, in rank order: a small value that JSON can hold, of any size.

    Args:
      own: this rank's value.
      name: of the transfer, the same on every rank.
    Ranks: collective.
    """
    ranks = current()
    if ranks.size == 1:
        return [own]
    letters = np.frombuffer(json.dumps(own).encode() + b"\n", np.uint8).astype(np.int32)
    with uncounted():
        found = run_apart(lambda row: ranks.all_gather(row, name), letters)
    return [json.loads(line) for line in bytes(found.tolist()).splitlines()]


def wait_for_ranks(name: str) -> None:
    """Returns once every rank has called this; a rank that dies meanwhile ends the job.

    Args:
      name: of the transfer, the same on every rank.
    Ranks: collective.
    """
    gather_values(0, name)


def say_apart() -> None:
    """Says, once in a process, that its ranks train apart."""
    _say_once(place_in_job()[1])


def is_looking() -> bool:
    """Whether this is rank 0 of several ranks, which alone looks and speaks."""
    rank, size = place_in_job()
    return rank == 0 and size > 1


class _Count:
    def __init__(self):
        self.exchanges = Exchanges()
        self._unwatched = {
            horovod_internals.OPERATORS_MODULE: horovod_internals.call_at_exchanges,
            horovod_internals.MODULE: horovod_internals.call_at_averages,
        }

    def watch(self):
        for name, call_at in list(self._unwatched.items()):
            if name not in sys.modules:
                after_import(name, functools.partial(call_at, note=self.note))
            elif not call_at(sys.modules[name], self.note):
                continue  # it is Horovod's import that has led here; the next call finds it complete
            del self._unwatched[name]

    def note(self, tensors):
        exchanged = [tensor for tensor in tf.nest.flatten(tensors) if tensor is not None]
        shapes = [tf.TensorShape(getattr(tensor, "shape", ())) for tensor in exchanged]
        sizes = [shape.num_elements() for shape in shapes]
        is_of_one = None not in sizes and sum(sizes) <= 1
        self.exchanges = Exchanges(self.exchanges.of_any_size + 1, self.exchanges.of_several + (not is_of_one))


_COUNT = _Count()


class _Watch:
    """Keras optimizers: the exchanges before each was made, and how many `looked_at` the caller is inside of."""

    def __init__(self):
        self.depth = 0
        self._before: weakref.WeakKeyDictionary[Any, Exchanges] = weakref.WeakKeyDictionary()

    def note_made(self, optimizer):
        self._before[optimizer] = so_far()

    def note_update(self, optimizer, pairs):
        # TensorFlow's own strategies for several processes exchange without Horovod.
        if self.depth == 0 and tf.distribute.get_strategy().cluster_resolver is None:
            note_update(self._before.get(optimizer, Exchanges()), [variable for _, variable in pairs])


_WATCH = _Watch()


@functools.cache
def _watch_once() -> None:
    so_far()
    for watch in (watch_keras_optimizers, keras3.watch_optimizers):
        watch(_WATCH.note_made, _WATCH.note_update)


@functools.cache
def _say_once(size: int) -> None:
    _LOG.warning(
        "npu_bridge: %d ranks train apart: a step brings neither gradients nor weights of the ranks together, so each "
        "rank trains a model of its own, and only that of rank 0 is kept.",
        size,
    )
    _LOG.warning(
        "npu_bridge: to train one model, write is_distributed=True where the optimizer is made (NPUOptimizer, "
        "npu_keras_optimizer), or put NPUDistributedOptimizer, in Keras KerasDistributeOptimizer, around a stock one; "
        "to train alone, start one rank."
    )
