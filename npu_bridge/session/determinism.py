"""Implements the option `deterministic`: seeds and deterministic kernels, with which a run repeats bit for bit."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from npu_bridge.base.errors import say_once
from npu_bridge.base.session_wrapper import EnginePlace, SessionEngine, add_engine, find_engine
from npu_bridge.base.tf_internals.sessions import is_deterministic, set_deterministic
from npu_bridge.options import TrainingOptions
from npu_bridge.session.random_seeds import seed_operators

# Graph seed of a deterministic run that sets none; any number would do.
FALLBACK_SEED = 2023
_KEY = ("npu_bridge", "deterministic")  # TensorFlow exports collections with text keys only


def seed_graph(options: TrainingOptions, graph: tf.Graph) -> None:
    """Gives a graph a seed if it has none. Then gives a seed to each random operator that has none."""
    if graph.seed is None:
        graph.seed = choose_seed(options)
    if graph.seed is None:
        return
    seeded = seed_operators(graph, graph.seed)
    if seeded:
        say_once(
            logging.WARNING,
            f"deterministic: {len(seeded)} random operators had no seed; the first is {seeded[0]!r}. Each got a seed "
            f"made of {graph.seed}, its name and the rank, so that a run can be repeated.",
        )


def choose_seed(options: TrainingOptions) -> int | None:
    """Returns the graph seed of a run: the option `tf_random_seed`, or None.

    If this option is not set and `deterministic` is on, warns and returns a fixed seed.
    """
    if options.tf_random_seed is not None or options.deterministic != 1 or not options.use_off_line:
        return options.tf_random_seed
    say_once(
        logging.WARNING,
        f"deterministic: random operators need a seed and none is set. Expected tf_random_seed or "
        f"tf.set_random_seed(...) before the graph is built; got none. {FALLBACK_SEED} is used; set your "
        f"own seed.",
    )
    return FALLBACK_SEED


def mark_deterministic(graph: tf.Graph) -> None:
    """Marks a graph as deterministic: all its sessions then run deterministically."""
    graph.get_collection_ref(_KEY)[:] = [True]


def is_marked_deterministic(graph: Any) -> bool:
    """Returns whether a graph is marked as deterministic."""
    return isinstance(graph, tf.Graph) and bool(graph.get_collection(_KEY))


def run_deterministically(session: tf.compat.v1.Session) -> None:
    """Makes an existing session use TensorFlow's deterministic kernels; other sessions are not affected.

    TensorFlow has one determinism switch for the whole process. It is turned on while the session runs, and restored
    afterwards. While it is on, a graph that another thread builds needs a seed for its random operators.
    """
    if find_engine(session, _DeterministicEngine) is None:
        add_engine(session, _DeterministicEngine())


class _DeterministicEngine(SessionEngine):
    """A session engine that turns TensorFlow's determinism switch on while the session builds or runs kernels."""

    place = EnginePlace.DETERMINISM

    def call_kernels(self, session, call, *arguments):
        with _SWITCH.turn_on_in_block():
            return self.inner.call_kernels(session, call, *arguments)

    def set_up_partial_run(self, session, fetches, feeds):
        with _SWITCH.turn_on_in_block():
            return self.inner.set_up_partial_run(session, fetches, feeds)

    def prepare_call(self, session, callable_options):
        with _SWITCH.turn_on_in_block():
            call = self.inner.prepare_call(session, callable_options)

        def run(*arguments, **keywords):
            with _SWITCH.turn_on_in_block():
                return call(*arguments, **keywords)

        return run


class _DeterminismSwitch:
    """TensorFlow's determinism switch: on while any thread is in a block of `turn_on_in_block`, then restored."""

    def __init__(self):
        self._lock = threading.Lock()
        self._inside = 0
        self._was_on = False

    @contextlib.contextmanager
    def turn_on_in_block(self) -> Iterator[None]:
        with self._lock:
            if self._inside == 0:
                self._was_on = is_deterministic()
                set_deterministic(True)
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0 and not self._was_on:
                    set_deterministic(False)


_SWITCH = _DeterminismSwitch()
