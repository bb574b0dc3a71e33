"""Implements `profiling_config`: traces the first session runs for TensorBoard's profile page."""

from __future__ import annotations

import os
import weakref

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base.secondary_files import NonFatalOutput
from npu_bridge.base.terminal import logger
from npu_bridge.options import TrainingOptions
from npu_bridge.options.grammar import parse_profiling_options
from npu_bridge.session.hooked_session import run_with_hooks

_LOG = logger(__name__)

# Session runs in one trace: TensorFlow keeps a trace in memory until it ends, so it cannot hold a whole
# training. The first run, in which the graph is prepared, is among them.
PROFILED_RUNS = 20


class ProfilingHook(tf.estimator.SessionRunHook):
    """A hook that traces the first session runs into the folder `output` of `profiling_options`, created if missing.

    The trace ends after `PROFILED_RUNS` runs, or earlier: before a run that the script itself traces, at the end of the
    session, at a call of `end` after an error, or at the end of the process. With several ranks each rank writes to a
    separate folder `rank_<n>`.

    Ranks: local.
    """

    def __init__(self, options: TrainingOptions):
        self._folder = parse_profiling_options(options.profiling_options).get("output") or "."
        communicator = collective.current()
        if communicator.size > 1:
            self._folder = os.path.join(self._folder, f"rank_{communicator.rank}")
        self._secondary = NonFatalOutput(f"the trace of profiling_config in {self._folder}", (tf.errors.OpError,))
        self._runs = 0
        self._stop = None
        self._is_over = False

    def after_create_session(self, session, coord):
        """Adds a second hook inside the session, because only that hook sees run options that other hooks have set."""
        del coord
        run_with_hooks(session, [_TracedRunHook(self)])

    def before_run(self, run_context):
        """Starts the trace with the first run; TensorFlow marks each run in the trace."""
        self.end_before_traced_run(run_context)
        if self._stop is None and not self._is_over:
            self._secondary.attempt(self._start)

    def after_run(self, run_context, run_values):
        """Ends the trace after `PROFILED_RUNS` runs."""
        del run_context, run_values
        self._runs += 1
        if self._runs >= PROFILED_RUNS:
            self.end(None)

    def end(self, session):
        """Ends the trace and writes it; does nothing if there is no trace or it is already written."""
        del session
        self._is_over = True
        if self._stop is not None and self._stop.alive and self._secondary.attempt(self._stop, is_last_chance=True):
            _LOG.info("profiling_config: %d session runs traced to %s.", self._runs, self._folder)

    def end_before_traced_run(self, run_context):
        """Ends the trace before a run that the script traces itself, because TensorFlow makes one trace at a time."""
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
                "profiling_config: another profiler is running, so no trace is written to %s. Stop the other "
                "profiler, or leave profiling_config out.",
                self._folder,
            )
            return
        self._stop = weakref.finalize(self, _stop_profiler)


class _TracedRunHook(tf.estimator.SessionRunHook):
    def __init__(self, hook):
        self._hook = hook

    def before_run(self, run_context):
        self._hook.end_before_traced_run(run_context)


def _stop_profiler():
    """Ends the trace; logs a warning if another caller has already ended it."""
    try:
        tf.profiler.experimental.stop()
    except tf.errors.UnavailableError:
        _LOG.warning("profiling_config: another caller ended the trace.")
