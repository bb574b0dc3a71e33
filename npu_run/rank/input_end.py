"""Tells the launcher that a rank's input has ended, in case other ranks wait for a step that this rank never makes.

The end is detected in three ways: a training run of a session raises `OutOfRangeError` (even if the script catches it),
`model.fit` returns, or a script that has trained through sessions ends. The report is withdrawn if training continues,
as in the next epoch.
"""

from __future__ import annotations

import contextlib
import types
import weakref
from typing import Any, Callable

from npu_bridge.base.after_import import call_when_loaded, wrap_function
from npu_bridge.base.session_wrapper import SessionEngine, add_engine
from npu_bridge.base.tf_internals.names import KERAS_MODEL_MODULES

_END = "OutOfRangeError"


def watch_input(send: Callable[[dict[str, Any]], None]) -> Callable[[], None]:
    """Watches all trainings of this process once TensorFlow and Keras are loaded; `send` sends the reports.

    Returns:
      A function to call at the end of the script.
    """
    watch = _InputWatch(send)
    add_engine(None, watch)
    for name in KERAS_MODEL_MODULES:
        call_when_loaded(name, watch.watch_fit)
    return watch.report_exit


class _InputWatch(SessionEngine):
    def __init__(self, send: Callable[[dict[str, Any]], None]):
        self._send = send
        self._counts: dict[tuple, int] = {}
        self._ended: object = None  # the kind of run whose input has ended, or the model
        self._session: Callable[[], Any] = lambda: None  # the latest one of the latest graph
        self._graph: Callable[[], Any] = lambda: None
        self._asked: dict[tuple, list[str]] = {}  # names of the fetches, by the kind of run

    def execute(self, session, request):
        kind = (id(session), *map(id, request.targets), *(fetch.name for fetch in request.fetches))
        try:
            results = self.inner.execute(session, request)
        except Exception as error:
            if type(error).__name__ == _END:
                self._report_training_run(session, request.requested_elements, kind)
            raise
        self._counts[kind] = self._counts.get(kind, 0) + 1
        if self._session() is not session:
            self._remember_session(session)
        if kind not in self._asked:
            self._asked[kind] = [element.name for element in request.requested_elements]
        self._withdraw_report(kind)
        return results

    def watch_fit(self, module: types.ModuleType) -> None:
        """Wraps `fit` of a module's `Model` class to watch it."""

        def fit_and_report_end(fit, model, *arguments, **keywords):
            self._withdraw_report(self._ended)
            result = fit(model, *arguments, **keywords)
            steps = None
            with contextlib.suppress(Exception):  # without an optimizer, or with an unusual one
                import tensorflow as tf

                steps = int(tf.keras.backend.get_value(model.optimizer.iterations))
            self._report_end(model, steps, of_fit=True)
            return result

        wrap_function(module.Model, "fit", fit_and_report_end)

    def _report_training_run(self, session, fetches, kind):
        from npu_bridge.graph.run import run_of

        if run_of(session.graph, fetches).trains:
            self._report_end(kind, _read_global_step(session, self._counts.get(kind, 0)), of_fit=False)

    def report_exit(self) -> None:
        """Reports the script's number of steps as the script ends, unless an end of its input was reported already."""
        with contextlib.suppress(Exception):  # the graph can be gone
            steps = self._read_reached_step() if self._ended is None else 0
            if steps:
                self._report_end("exit", steps, of_fit=False, of_script=True)

    def _remember_session(self, session):
        if self._graph() is not session.graph:
            self._graph, self._asked = weakref.ref(session.graph), {}
        self._session = weakref.ref(session)

    def _read_reached_step(self):
        """Returns the latest graph's global step; without one, the most runs of a training; 0 if nothing trained."""
        graph, counts = self._graph(), {}
        if graph is None:
            return 0
        from npu_bridge.graph.run import run_of  # not earlier: a script may have no TensorFlow

        for kind, names in self._asked.items():
            run = run_of(graph, [graph.as_graph_element(name) for name in names])
            if run.trains:
                counts[run.trained_variable_names] = counts.get(run.trained_variable_names, 0) + self._counts[kind]
        most = max(counts.values(), default=0)
        return _read_global_step(self._session(), most) if most else 0

    def _report_end(self, ended_input, steps, **facts):
        self._ended = ended_input
        self._send({"input_end": {"steps": steps, **facts}})

    def _withdraw_report(self, ended_input):
        if self._ended is not None and ended_input == self._ended:
            self._ended = None
            self._send({"input_end": None})


def _read_global_step(session: Any, default: int) -> int:
    import tensorflow as tf

    from npu_bridge.base.tf_internals.sessions import run_without_engines

    with contextlib.suppress(Exception):  # the session can be closing, or the counter invalid
        counter = tf.compat.v1.train.get_global_step(session.graph)
        if counter is not None:
            return int(run_without_engines(session, [counter])[0])
    return default
