"""Counts collectives, and warns when an update outside of TF 1 graphs combines nothing between the ranks.

Updates of Keras optimizers, in a `fit` or in the user's own loop, are checked when the function around them is
complete, or right before an eager update: has any collective run since the optimizer was made? For TF 1 graphs,
`gradients/training_apart.py` asks the sessions.

Adds nothing to functions and does not start Horovod; only rank 0 checks and prints.
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
from npu_bridge.collective.tensorflow_ranks import call_at_exchanges
from npu_bridge.collective.this_process import current, place_in_job

_LOG = logger(__name__)


class Exchanges(NamedTuple):
    """Counts of collectives that combined values of the ranks.

    Attributes:
      of_any_size: all of them.
      of_several: those of more than one number. A single number can be a loss that is averaged only for display.
    """

    of_any_size: int = 0
    of_several: int = 0


def so_far() -> Exchanges:
    """Returns this process's counts since the first call; always zero except on rank 0 of several ranks."""
    if not is_looking():
        return Exchanges()
    _COUNT.watch()
    return _COUNT.exchanges


def watch_updates() -> bool:
    """Checks updates of Keras optimizers on rank 0 of several ranks; calling it again has no effect.

    Returns:
      Whether updates are checked.
    """
    # Contradicting variables raise where ranks are needed.
    with contextlib.suppress(ValueError):
        if is_looking():
            _watch_once()
            return True
    return False


def note_update(before: Exchanges, variables: Iterable[Any]) -> None:
    """Checks an update, right before it is made outside of TF 1 graphs, by an optimizer that exchanges nothing.

    Args:
      before: the result of `so_far` when the optimizer was made.
      variables: the updated variables.
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
        # Collectives after the update, perhaps of weights, are not built yet.
        when_function_is_built(function, tell)
    # Else it is a TF 1 graph, perhaps a branch of a condition in it, whose sessions are checked.


@contextlib.contextmanager
def looked_at() -> Iterator[None]:
    """Does not check updates of Keras optimizers inside the block: the caller knows what they exchange, and when."""
    _WATCH.depth += 1
    try:
        yield
    finally:
        _WATCH.depth -= 1


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """Does not count collectives inside the block: they check the ranks, for example, and train nothing."""
    before = so_far()
    try:
        yield
    finally:
        if is_looking():
            _COUNT.exchanges = before


def gather_values(own: Any, name: str) -> list:
    """Returns the values of all ranks, in rank order; each is small, JSON-compatible and of any size.

    Args:
      own: this rank's value.
      name: name of the collective, the same on every rank.
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
      name: name of the collective, the same on every rank.
    Ranks: collective.
    """
    gather_values(0, name)


def say_apart() -> None:
    """Warns, once in a process, that no values are combined between its ranks, so each trains another model."""
    _say_once(place_in_job()[1])


def is_looking() -> bool:
    """Returns whether this is rank 0 of several ranks, the only one that checks and prints."""
    rank, size = place_in_job()
    return rank == 0 and size > 1


class _Count:
    def __init__(self):
        self.exchanges = Exchanges()
        self._is_told = False
        self._unwatched = {
            horovod_internals.OPERATORS_MODULE: horovod_internals.call_at_exchanges,
            horovod_internals.MODULE: horovod_internals.call_at_averages,
        }

    def watch(self):
        if not self._is_told:
            self._is_told = True
            call_at_exchanges(self.note)
        for name, call_at in list(self._unwatched.items()):
            if name not in sys.modules:
                after_import(name, functools.partial(call_at, note=self.note))
            elif not call_at(sys.modules[name], self.note):
                continue  # this call is part of Horovod's import; the next call finds it complete
            del self._unwatched[name]

    def note(self, tensors):
        exchanged = [tensor for tensor in tf.nest.flatten(tensors) if tensor is not None]
        shapes = [tf.TensorShape(getattr(tensor, "shape", ())) for tensor in exchanged]
        sizes = [shape.num_elements() for shape in shapes]
        is_of_one = None not in sizes and sum(sizes) <= 1
        self.exchanges = Exchanges(self.exchanges.of_any_size + 1, self.exchanges.of_several + (not is_of_one))


_COUNT = _Count()


class _KerasWatch:
    """Keras optimizers: the counts before each was made, and the number of enclosing `looked_at` blocks."""

    def __init__(self):
        self.depth = 0
        self._before: weakref.WeakKeyDictionary[Any, Exchanges] = weakref.WeakKeyDictionary()

    def note_made(self, optimizer):
        self._before[optimizer] = so_far()

    def note_update(self, optimizer, pairs):
        # TensorFlow's own strategies for several processes exchange without Horovod.
        if self.depth == 0 and tf.distribute.get_strategy().cluster_resolver is None:
            note_update(self._before.get(optimizer, Exchanges()), [variable for _, variable in pairs])


_WATCH = _KerasWatch()


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
