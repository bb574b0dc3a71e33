"""Defines `Profiler`: a trace of the session runs inside a `with` block."""

from __future__ import annotations

import os
from typing import Any

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base import environment
from npu_bridge.base.errors import message, shown

__all__ = ["Profiler"]

# The levels of TensorFlow's host tracer: 1 traces events marked by users, 2 adds expensive operators, 3 all of them.
_TRACER_LEVELS = {"L0": 1, "L1": 2, "L2": 3}
_METRICS = (
    "ArithmeticUtilization",
    "PipeUtilization",
    "Memory",
    "MemoryL0",
    "MemoryUB",
    "ResourceConflictRatio",
    "L2Cache",
)


class Profiler:
    """Writes a trace of the session runs inside a `with` block, for the profile page of TensorBoard.

    Meant for scripts that open sessions; an `NPURunConfig` has `profiling_config` instead. Run the graph once before
    the block, since the first run also prepares the graph. Trace only a few runs: a trace is kept in memory until its
    end. With several ranks, each rank writes to a folder `rank_<n>`.

    Args:
      level: "L0", "L1" or "L2", from few events to all events.
      aic_metrics: counters of the device, one of ArithmeticUtilization, PipeUtilization, Memory, MemoryL0, MemoryUB,
        ResourceConflictRatio and L2Cache; checked at the levels L1 and L2, otherwise without effect.
      output_path: an existing folder; by default the working directory.
    Raises:
      ValueError: a value is not a string or is not listed here, or the folder does not exist.
      RuntimeError: on entering the block: a trace is already being written (even by this object), or the environment
        variable PROFILING_MODE is on.
    Ranks: local.
    Example:
      with profiler.Profiler(level="L1", output_path="trace"):
          session.run(train_op)
    """

    def __init__(self, *, level: str = "L0", aic_metrics: str = "", output_path: str = ""):
        given = {"level": level, "aic_metrics": aic_metrics, "output_path": output_path}
        for name, value in given.items():
            if not isinstance(value, str):
                raise _argument_error(f"{name} is not a string", "a string", value, f'Pass {name}="...".')
        if level not in _TRACER_LEVELS:
            raise _argument_error("level is unknown", f"one of {', '.join(_TRACER_LEVELS)}", level, 'Pass level="L1".')
        if level != "L0" and aic_metrics and aic_metrics not in _METRICS:
            raise _argument_error(
                "aic_metrics is unknown", f"one of {', '.join(_METRICS)}", aic_metrics, "Leave it out."
            )
        if output_path and not os.path.isdir(output_path):
            raise _argument_error(
                "output_path is not a folder", "an existing folder", output_path, "Create the folder first."
            )
        self._level = _TRACER_LEVELS[level]
        self._folder = output_path or "."
        self._is_running = False

    def __enter__(self) -> Profiler:
        self.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def start(self) -> None:
        """Begins the trace; entering the `with` block calls this method."""
        if environment.is_flag_on("PROFILING_MODE"):
            raise RuntimeError(_nested_trace_message("the trace of PROFILING_MODE", "Unset PROFILING_MODE."))
        ranks = collective.current()
        folder = os.path.join(self._folder, f"rank_{ranks.rank}") if ranks.size > 1 else self._folder
        options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=self._level)
        try:
            tf.profiler.experimental.start(folder, options)
        except tf.errors.AlreadyExistsError as error:
            fix = "End the other trace first, or leave profiling_config out."
            raise RuntimeError(_nested_trace_message("the trace of another profiler", fix)) from error
        self._is_running = True

    def stop(self) -> None:
        """Ends and writes the trace; leaving the `with` block calls this method. A second call has no effect."""
        if self._is_running:
            self._is_running = False
            tf.profiler.experimental.stop()


def _argument_error(problem: str, expected: str, got: Any, fix: str) -> ValueError:
    return ValueError(message("Profiler", problem, expected, shown(got), fix))


def _nested_trace_message(got: str, fix: str) -> str:
    return message("Profiler", "a trace is already being written", "one trace at a time", got, fix)
