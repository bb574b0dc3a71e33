"""Counts collectives, and warns if ranks update variables without any collective, outside of TF 1 graphs.

Checks updates of Keras optimizers in `fit` and in custom loops: has any collective run since the optimizer was made? An
update in a function is checked when the function is complete, an eager update right before it. For TF 1 graphs,
`gradients/first_step/training_apart.py` checks the runs of sessions.

Adds nothing to functions and does not start Horovod. Only rank 0 checks and warns.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from npu_bridge.base import horovod_internals
from npu_bridge.base.after_import import call_after_import
from npu_bridge.base.terminal import logger
from npu_bridge.base.tf_internals import keras3
from npu_bridge.base.tf_internals.graphs import call_when_function_is_built
from npu_bridge.base.tf_internals.training import watch_keras_optimizers
from npu_bridge.collective import wire_names
from npu_bridge.collective.engines.tensorflow_ranks import call_before_collectives
from npu_bridge.collective.this_process import rank_and_size_of_job

_LOG = logger(__name__)


class Exchanges(NamedTuple):
    """Numbers of collectives that combined values of the ranks.

    Attributes:
      of_any_size: number of all collectives.
      of_several: number of collectives with more than one element; a single element can be a loss that is averaged only
        for display.
    """

    of_any_size: int = 0
    of_several: int = 0


def count_exchanges() -> Exchanges:
    """Returns the numbers of collectives since the first call; always zero except on rank 0 of several ranks."""
    if not is_checking_rank():
        return Exchanges()
    _COUNT.watch_collectives()
    return _COUNT.exchanges


def watch_updates() -> bool:
    """Makes rank 0 of several ranks check updates of Keras optimizers; calling it again has no effect.

    Returns:
      Whether this rank checks updates.
    """
    # Environment variables that contradict each other raise an error where ranks are needed.
    with contextlib.suppress(ValueError):
        if is_checking_rank():
            _watch_updates_once()
            return True
    return False


def warn_of_update_without_exchange(exchanges_at_creation: Exchanges, variables: Iterable[Any]) -> None:
    """Warns if no collective has been called since an optimizer was made.

    Call this right before an update by the optimizer, outside of TF 1 graphs.

    Args:
      exchanges_at_creation: the result of `count_exchanges` when the optimizer was made.
      variables: the updated variables.
    """
    if not is_checking_rank():
        return
    is_small = all(variable.shape.num_elements() == 1 for variable in variables)

    def warn_if_apart():
        now = count_exchanges()
        if now.of_several == exchanges_at_creation.of_several and not (
            is_small and now.of_any_size > exchanges_at_creation.of_any_size
        ):
            warn_ranks_train_apart()

    function = wire_names.graph_numbering_collectives()
    if function is None:
        warn_if_apart()
    elif function.building_function:
        # Collectives after the update, perhaps of weights, are not built yet.
        call_when_function_is_built(function, warn_if_apart)
    # Otherwise `function` is a TF 1 graph, or a branch in such a graph; there the runs of sessions are checked.


@contextlib.contextmanager
def disable_update_checks() -> Iterator[None]:
    """Turns the check of Keras updates off inside the block, for callers whose updates need no such check."""
    _WATCH.depth += 1
    try:
        yield
    finally:
        _WATCH.depth -= 1


@contextlib.contextmanager
def disable_exchange_count() -> Iterator[None]:
    """Leaves the collectives of the block out of the count, because they only check ranks, for example."""
    before = count_exchanges()
    try:
        yield
    finally:
        if is_checking_rank():
            _COUNT.exchanges = before


def warn_ranks_train_apart() -> None:
    """Warns once per process that no collective combines values of the ranks, so each rank trains its own model."""
    _warn_ranks_train_apart_once(rank_and_size_of_job()[1])


def is_checking_rank() -> bool:
    """Returns whether this process is rank 0 of several ranks, the only rank that checks updates."""
    rank, size = rank_and_size_of_job()
    return rank == 0 and size > 1


class _ExchangeCounter:
    def __init__(self):
        self.exchanges = Exchanges()
        self._is_watching = False
        self._unwatched = {
            horovod_internals.OPERATORS_MODULE: horovod_internals.call_before_collectives,
            horovod_internals.MODULE: horovod_internals.call_before_averaging,
        }

    def watch_collectives(self):
        if not self._is_watching:
            self._is_watching = True
            call_before_collectives(self.count_exchange)
        for name, call_at in list(self._unwatched.items()):
            if name not in sys.modules:
                call_after_import(name, functools.partial(call_at, callback=self.count_exchange))
            elif not call_at(sys.modules[name], self.count_exchange):
                continue  # this call is part of Horovod's import; the next call finds it complete
            del self._unwatched[name]

    def count_exchange(self, tensors):
        exchanged = [tensor for tensor in tf.nest.flatten(tensors) if tensor is not None]
        shapes = [tf.TensorShape(getattr(tensor, "shape", ())) for tensor in exchanged]
        sizes = [shape.num_elements() for shape in shapes]
        is_of_one = None not in sizes and sum(sizes) <= 1
        self.exchanges = Exchanges(self.exchanges.of_any_size + 1, self.exchanges.of_several + (not is_of_one))


_COUNT = _ExchangeCounter()


class _KerasUpdates:
    """Checks updates of Keras optimizers, each with the number of collectives since the optimizer was made.

    Attributes:
      depth: number of enclosing `disable_update_checks` blocks, in which updates are not checked.
    """

    def __init__(self):
        self.depth = 0
        self._before: weakref.WeakKeyDictionary[Any, Exchanges] = weakref.WeakKeyDictionary()

    def note_new_optimizer(self, optimizer):
        self._before[optimizer] = count_exchanges()

    def warn_of_update_without_exchange(self, optimizer, grads_and_vars):
        # TensorFlow's own strategies for several processes exchange without Horovod.
        if self.depth == 0 and tf.distribute.get_strategy().cluster_resolver is None:
            warn_of_update_without_exchange(
                self._before.get(optimizer, Exchanges()), [variable for _, variable in grads_and_vars]
            )


_WATCH = _KerasUpdates()


@functools.cache
def _watch_updates_once() -> None:
    count_exchanges()
    for watch in (watch_keras_optimizers, keras3.watch_optimizers):
        watch(_WATCH.note_new_optimizer, _WATCH.warn_of_update_without_exchange)


@functools.cache
def _warn_ranks_train_apart_once(size: int) -> None:
    _LOG.warning(
        "npu_bridge: %d ranks train apart: a step combines neither gradients nor weights of the ranks, so each rank "
        "trains its own model, and only the model of rank 0 is kept.",
        size,
    )
    _LOG.warning(
        "npu_bridge: to train one model, write is_distributed=True where the optimizer is made (NPUOptimizer, "
        "npu_keras_optimizer), or wrap a stock optimizer in NPUDistributedOptimizer (in Keras, in "
        "KerasDistributeOptimizer); to train alone, start one rank."
    )
