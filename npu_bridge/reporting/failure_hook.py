"""Defines `FailureHook`, which adds the error that stops a training to the report, and lets the error propagate."""

from __future__ import annotations

import contextlib
import pathlib
import sys
from typing import Any, Callable, TextIO

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base.secondary_files import NonFatalOutput
from npu_bridge.base.session_wrapper import EnginePlace, SessionEngine, add_engine
from npu_bridge.base.tf_internals.callers import is_being_freed
from npu_bridge.base.tf_internals.sessions import is_remote, run_without_engines
from npu_bridge.collective.lost_rank import tells_of_lost_rank
from npu_bridge.graph.variables import global_step_of
from npu_bridge.reporting import page  # its modules are loaded when a page is made
from npu_bridge.reporting.history import History
from npu_bridge.reporting.output import choose_output
from npu_bridge.session.elastic.stop_request import STOPPED_EXIT_CODE

_PLAIN_ENDS = (StopIteration, tf.errors.OutOfRangeError)  # these end a MonitoredSession and `fit` normally


class FailureHook(tf.estimator.SessionRunHook):
    """A hook that writes `report.html` with the error if an error stops a training.

    Every `ReportHook` contains a FailureHook, and an `NPUEstimator` has one on ranks above 0. If a file cannot be
    written, this is logged. The error is raised unchanged.

    Args:
      folder: folder of the training.
      prepare: called with the global step before the page is made.
      history: history of the training. None: the history is read from the folder.
      stream: where rank 0 prints the path of the page. None: the `sys.stdout` at the time of the error.
    Graph: adds nothing.
    Ranks: local. A rank without `report.json` in its folder writes nothing.
    """

    def __init__(
        self,
        folder: str,
        prepare: Callable[[int | None], None] | None = None,
        history: History | None = None,
        stream: TextIO | None = None,
    ):
        self._folder, self._prepare, self._history, self._stream = folder, prepare, history, stream
        self._global_step = None

    def begin(self):
        """Finds the global step."""
        self._global_step = global_step_of()

    def after_create_session(self, session, coord):
        """Watches for the end of the session."""
        add_engine(session, _ErrorWatchingEngine(self._report_error))

    def _report_error(self, session, error: BaseException) -> None:
        step = None
        if self._global_step is not None and not is_remote(session):
            with contextlib.suppress(Exception):  # the error can have broken the session too
                step = int(run_without_engines(session, [self._global_step])[0])
        if self._prepare is not None:
            self._prepare(step)
        report_failure(self._folder, error, step, self._history, self._stream or sys.stdout)


class _ErrorWatchingEngine(SessionEngine):
    """A layer around the calls of a session (a session engine): reports the error that ends the session."""

    place = EnginePlace.HOOKS

    def __init__(self, report_error: Callable[[Any, BaseException], None]):
        self._report_error = report_error
        self._handled = sys.exc_info()[1]  # an error that the script is handling while it trains

    def close(self, session):
        error = sys.exc_info()[1]
        is_of_training = error is not None and error is not self._handled and stops_training(error)
        if is_of_training and not is_being_freed(session):  # which can happen during any other error
            self._handled = error
            secondary = NonFatalOutput("the report of the error", (Exception,))
            secondary.attempt(self._report_error, session, error)
        self.inner.close(session)


def report_failure(
    folder: str, error: BaseException, step: int | None, history: History | None = None, stream: TextIO | None = None
) -> None:
    """Records an error in `report.json` and makes the page.

    Args:
      folder: folder of the training.
      error: an error that is being handled.
      step: the last global step.
      history: history of the training on rank 0; other ranks read it from the folder.
      stream: where rank 0 prints the path of the page. None: nowhere.
    Raises:
      OSError: a file cannot be written.
    Ranks: local.
    """
    rank = collective.current().rank
    if rank > 0 and isinstance(error, KeyboardInterrupt):
        return  # rank 0 is interrupted too
    failure = page.describe_failure(error, step, rank, is_secondary=tells_of_lost_rank(error))
    if page.note_failure(folder, failure) or rank == 0:
        made = page.write_page(folder, history=None if rank else history)
        if stream is not None and rank == 0:
            choose_output(stream).note(f"report, with the error: {pathlib.Path(made).absolute().as_uri()}")


def stops_training(error: BaseException) -> bool:
    """Returns whether an error stops a training before its normal end."""
    if isinstance(error, SystemExit):
        return error.code not in (None, 0, STOPPED_EXIT_CODE)
    return not isinstance(error, (*_PLAIN_ENDS, GeneratorExit))
