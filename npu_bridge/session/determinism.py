"""The option `deterministic`: seeds and deterministic kernels, so that the same run gives the same bits."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from npu_bridge.base.errors import say_once
from npu_bridge.base.session_wrapper import Place, SessionEngine, add_engine, find_engine
from npu_bridge.base.tf_internals.sessions import is_deterministic, set_deterministic
from npu_bridge.options import TrainingOptions
from npu_bridge.session.random_seeds import seed_operators

# Graph seed of a deterministic run that sets none; any number would do (ours).
FALLBACK_SEED = 2023
_KEY = ("npu_bridge", "deterministic")  # TensorFlow exports collections with text keys only


def give_seed(options: TrainingOptions, graph: tf.Graph) -> None:
    """Gives a graph a seed if it has none, and then each random operator without one."""
    if graph.seed is None:
        graph.seed = choose_seed(options)
    if graph.seed is None:
        return
    seeded = seed_operators(graph, graph.seed)
    if seeded:
        say_once(
            logging.WARNING,
            f"deterministic: {len(seeded)} of the random operators had no seed, the first is {seeded[0]!r}. Each got "
            f"one made of {graph.seed}, its name and the rank, so that a run can be repeated.",
        )


def choose_seed(options: TrainingOptions) -> int | None:
    """Returns the graph seed of a run: `tf_random_seed`, else a fixed one, with a warning, if determinism needs one."""
    if options.tf_random_seed is not None or options.deterministic != 1 or not options.use_off_line:
        return options.tf_random_seed
    say_once(
        logging.WARNING,
        f"deterministic: random operators need a seed and none is set. Expected tf_random_seed or "
        f"tf.set_random_seed(...) before the graph is built; got none. {FALLBACK_SEED} is used; set your "
        f"own seed.",
    )
    return FALLBACK_SEED


def mark(graph: tf.Graph) -> None:
    """Marks a graph, all of whose sessions then run deterministically."""
    graph.get_collection_ref(_KEY)[:] = [True]


def is_marked(graph: Any) -> bool:
    """Returns whether `mark` was called for a graph."""
    return isinstance(graph, tf.Graph) and bool(graph.get_collection(_KEY))


def run_deterministically(session: tf.compat.v1.Session) -> None:
    """Makes an existing session run with TensorFlow's deterministic kernels; other sessions are not affected.

    TensorFlow has one switch for the process: it is on while such a session runs, and restored afterwards. Meanwhile
    another thread that builds a graph needs a seed for random operators.
    """
    if find_engine(session, _Determinism) is None:
        add_engine(session, _Determinism())


class _Determinism(SessionEngine):
    """Turns the switch on while a session builds or runs kernels, which read it."""

    place = Place.DETERMINISM

    def call_kernels(self, session, call, *arguments):
        with _switch().on():
            return self.inner.call_kernels(session, call, *arguments)

    def set_up_partial_run(self, session, fetches, feeds):
        with _switch().on():
            return self.inner.set_up_partial_run(session, fetches, feeds)

    def prepare_call(self, session, callable_options):
        with _switch().on():
            made = self.inner.prepare_call(session, callable_options)

        def run(*arguments, **keywords):
            with _switch().on():
                return made(*arguments, **keywords)

        return run


class _Switch:
    """TensorFlow's switch for determinism: on while any caller is in a block of `on`, then restored."""

    def __init__(self):
        self._lock = threading.Lock()
        self._inside = 0
        self._was_on = False

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
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


@functools.cache
def _switch() -> _Switch:
    """Returns the switch of this process."""
    return _Switch()
