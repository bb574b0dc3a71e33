"""Tells the launcher when a rank's input has ended: other ranks may then wait for a step that this rank never makes.

Noticed are a training run of a session that raises `OutOfRangeError`, whoever catches it, and a `model.fit` that
returns. Where training goes on after that, as in the next epoch, it is taken back.
"""

from __future__ import annotations

import contextlib
import functools
import types
from typing import Any, Callable

from npu_bridge.base.after_import import when_loaded
from npu_bridge.base.tf_internals.names import KERAS_MODEL_MODULES
from npu_bridge.base.tf_internals.sessions import put_around_sessions

__all__ = ["watch_input"]

_END = "OutOfRangeError"


def watch_input(send: Callable[[dict[str, Any]], None]) -> None:
    """Watches all trainings of this process, as soon as TensorFlow and Keras are loaded; `send` takes messages."""
    watch = _Watch(send)
    put_around_sessions(do_run=watch.run)
    for name in KERAS_MODEL_MODULES:
        when_loaded(name, watch.change_fit)


class _Watch:
    def __init__(self, send: Callable[[dict[str, Any]], None]):
        self._send = send
        self._counts: dict[tuple, int] = {}
        self._ended: object = None  # the kind of run whose input has ended, or the model

    def run(self, do_run: Callable, session: Any, handle: Any, targets: list, fetches: list, *rest: Any) -> Any:
        """In place of a session's run."""
        kind = (id(session), *map(id, targets), *(fetch.name for fetch in fetches))
        try:
            results = do_run(session, handle, targets, fetches, *rest)
        except Exception as error:
            if type(error).__name__ == _END:
                self._note_run(session, [*targets, *fetches], kind)
            raise
        self._counts[kind] = self._counts.get(kind, 0) + 1
        self._take_back(kind)
        return results

    def change_fit(self, module: types.ModuleType) -> None:
        """Watches `fit` of the models of a module."""
        fit = module.Model.fit

        @functools.wraps(fit)
        def watched(model, *arguments, **keywords):
            self._take_back(self._ended)
            result = fit(model, *arguments, **keywords)
            steps = None
            with contextlib.suppress(Exception):  # there may be no optimizer, or one of its own kind
                import tensorflow as tf

                steps = int(tf.keras.backend.get_value(model.optimizer.iterations))
            self._tell(model, steps, of_fit=True)
            return result

        module.Model.fit = watched

    def _note_run(self, session, asked, kind):
        from npu_bridge.graph.run import run_of

        if run_of(session.graph, asked).trains:
            self._tell(kind, _global_step(session, self._counts.get(kind, 0)), of_fit=False)

    def _tell(self, what, steps, of_fit):
        self._ended = what
        self._send({"input_end": {"steps": steps, "of_fit": of_fit}})

    def _take_back(self, what):
        if self._ended is not None and what == self._ended:
            self._ended = None
            self._send({"input_end": None})


def _global_step(session: Any, otherwise: int) -> int:
    import tensorflow as tf

    from npu_bridge.base.tf_internals.sessions import run_quietly

    with contextlib.suppress(Exception):  # the session may be closing, and the counter be none
        counter = tf.compat.v1.train.get_global_step(session.graph)
        if counter is not None:
            return int(run_quietly(session, [counter])[0])
    return otherwise
