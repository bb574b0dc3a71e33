"""Implements `profiling_config`: traces the first steps for TensorBoard's profile page."""

from __future__ import annotations

import os
import weakref

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base.secondary_files import Secondary
from npu_bridge.base.terminal import logger
from npu_bridge.options import TrainingOptions
from npu_bridge.options.grammar import parse_profiling_options
from npu_bridge.session.hooked_session import run_with_hooks

_LOG = logger(__name__)

# Session runs in one trace (ours): TensorFlow keeps a trace in memory until it ends, so it cannot hold a whole
# training. The first run, in which the graph is prepared, is among them.
PROFILED_RUNS = 20


class ProfilingHook(tf.estimator.SessionRunHook):
    """Traces the first session runs into the folder `output` of `profiling_options`, created when missing.

    The trace ends after `PROFILED_RUNS` runs, before a run that the script itself traces, with the session, when `end`
    is called after an error, or, at the latest, with the process. With several ranks each writes to its own folder
    `rank_<n>`.

    Ranks: local.
    """

    def __init__(self, options: TrainingOptions):
        self._folder = parse_profiling_options(options.profiling_options).get("output") or "."
        communicator = collective.current()
        if communicator.size > 1:
            self._folder = os.path.join(self._folder, f"rank_{communicator.rank}")
        self._secondary = Secondary(f"the trace of profiling_config in {self._folder}", (tf.errors.OpError,))
        self._runs = 0
        self._stop = None
        self._is_over = False

    def after_create_session(self, session, coord):
        """Watches the runs of the session itself, which have the options that other hooks asked for."""
        del coord
        run_with_hooks(session, [_GivesWay(self)])

    def before_run(self, run_context):
        """Starts the trace with the first run; TensorFlow marks the runs in it."""
        self.give_way(run_context)
        if self._stop is None and not self._is_over:
            self._secondary.attempt(self._start)

    def after_run(self, run_context, run_values):
        """Ends the trace after the last run it holds."""
        del run_context, run_values
        self._runs += 1
        if self._runs >= PROFILED_RUNS:
            self.end(None)

    def end(self, session):
        """Writes the trace; does nothing without a trace or after it is written."""
        del session
        self._is_over = True
        if self._stop is not None and self._stop.alive and self._secondary.attempt(self._stop, now=True):
            _LOG.info("profiling_config: %d session runs traced to %s.", self._runs, self._folder)

    def give_way(self, run_context):
        """Ends the trace before a run that the script traces: TensorFlow makes one trace at a time."""
        options = run_context and run_context.original_args.options
        if options is not None and options.trace_level > options.NO_TRACE:
            self.end(None)

    def _start(self):
        os.makedirs(self._folder, exist_ok=True)
        try:
            tf.profiler.experimental.start(self._folder)
        except tf.errors.AlreadyExistsError:
            self._is_over = True
            _LOG.warning(
                "profiling_config: another profiler is running, so no trace is written to %s. Stop the other one, "
                "or leave profiling_config out.",
                self._folder,
            )
            return
        self._stop = weakref.finalize(self, _stop_quietly)


class _GivesWay(tf.estimator.SessionRunHook):
    def __init__(self, hook):
        self._hook = hook

    def before_run(self, run_context):
        self._hook.give_way(run_context)


def _stop_quietly():
    """Ends the trace; logs a warning if another caller ended it before."""
    try:
        tf.profiler.experimental.stop()
    except tf.errors.UnavailableError:
        _LOG.warning("profiling_config: another caller ended the trace.")
