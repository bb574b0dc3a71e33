"""Records traces of some training steps of a script, for `npu-run --timeline`.

A recorder is a hook of all training runs of a rank. It counts the runs, by the global step if the graph has one, and
traces the chosen steps with TensorFlow. It converts and writes the records only after the last of these steps, so that
other ranks do not have to wait in between.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import weakref
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2

from npu_bridge.base.files import new_file
from npu_bridge.base.secondary_files import NonFatalOutput
from npu_bridge.base.tf_internals.sessions import chrome_trace, run_without_engines
from npu_bridge.graph.variables import global_step_of
from npu_bridge.reporting.step_reading import read_overlapping_steps, read_step
from npu_bridge.session import steps_per_run
from npu_bridge.session.hooked_session import TrainingHook
from npu_bridge.session.iterations import take_run_metadata


class StepRecorder(TrainingHook):
    """A hook that records certain training steps of this rank and writes them to a file.

    The file is a Chrome trace (chrome://tracing, Perfetto). Its key `npu_bridge` holds a `StepTrace` for each step. The
    file is written after the last of the steps, or when the process ends earlier.

    Args:
      steps: numbers of the steps to record. Step n is the session run that begins with the global step n; without a
        global step, it is the n-th training run, counted from 0. Of a run that trains several steps, only the last step
        is recorded; if the steps overlap, the four steps before the last are recorded, too.
      path: the file, overwritten if it exists.
      rank: this rank.
    Attributes:
      steps, rank: the arguments.
    """

    def __init__(self, steps: range, path: str, rank: int):
        self.steps = steps
        self.rank = rank
        self._path = path
        self._runs = 0
        self._first_seen: int | None = None
        self._last_seen: int | None = None
        self._steps_per_run = 1
        self._recorded: dict[int, Any] = {}
        self._overlapping: tuple[int, Any] | None = None  # the last of some steps, and their record
        self._running: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # steps of runs in threads
        atexit.register(self.finish)

    def before_run(self, run_context):
        """Requests a trace if the step must be recorded."""
        step = self._running[run_context] = self._number_of_next_step(run_context.session)
        self.record_step_number(step)
        if step not in self.steps:
            return None
        options = _traced_run_options(run_context.session, run_context.original_args.options)
        return tf.estimator.SessionRunArgs(None, options=options)

    def after_run(self, run_context, run_values):
        """Keeps the trace; writes all traces after the last of the steps."""
        step = self._running.pop(run_context)
        if step in self.steps:
            self.keep_step_record(step, run_values.run_metadata)
            overlapping = take_run_metadata(run_context.session)
            if overlapping is not None:
                self._overlapping = (step - 1, overlapping)
        self._runs += 1
        if step >= self.steps[-1]:
            self.finish()

    def record_step_number(self, step: int) -> None:
        """Notes that a step is trained."""
        self._first_seen = step if self._first_seen is None else self._first_seen
        self._last_seen = step

    def keep_step_record(self, step: int, metadata: config_pb2.RunMetadata) -> None:
        """Keeps the record of a step. A skipped step is repeated; the last repetition counts."""
        self._recorded[step] = metadata

    def finish(self) -> None:
        """Writes the records and ignores all later runs; another call has no effect."""
        if self.is_over:
            return
        self.is_over = True
        atexit.unregister(self.finish)
        what = f"the timeline of rank {self.rank} in {self._path}"
        NonFatalOutput(what, (ValueError, KeyError)).attempt(self._write)
        self._recorded.clear()
        self._overlapping = None

    def _number_of_next_step(self, session):
        """Returns the number of the step that the next run trains; if the run trains several steps, of the last one."""
        steps = self._steps_per_run = steps_per_run(session)
        global_step = global_step_of(session.graph)
        first = self._runs * steps if global_step is None else int(run_without_engines(session, [global_step])[0])
        return first + steps - 1

    def _write(self):
        if not self._recorded and os.path.exists(self._path):
            return  # the file of an earlier attempt; this attempt started after these steps
        traces = [read_step(metadata, step, self.rank) for step, metadata in sorted(self._recorded.items())]
        overlapping = []
        if self._overlapping is not None:
            last, record = self._overlapping
            overlapping = read_overlapping_steps(record, last, self.rank)
        facts = {
            "rank": self.rank,
            "host": socket.gethostname(),
            "first_step_seen": self._first_seen,
            "last_step_seen": self._last_seen,
            "steps_per_run": self._steps_per_run,
            "steps": [trace.as_facts() for trace in traces],
            "overlapping_steps": [trace.as_facts() for trace in overlapping],
        }
        events = [event for _, metadata in sorted(self._recorded.items()) for event in self._chrome_events(metadata)]
        os.makedirs(os.path.dirname(self._path) or ".", exist_ok=True)
        with new_file(self._path) as file:
            json.dump({"traceEvents": events, "npu_bridge": facts}, file)

    def _chrome_events(self, metadata):
        chrome = json.loads(chrome_trace(metadata.step_stats))
        for event in chrome["traceEvents"]:
            # Unique numbers, so that the files of all ranks can be opened together.
            event["pid"] = self.rank * 1000 + event["pid"]
            if event.get("name") == "process_name":
                event["args"]["name"] = f"rank {self.rank}: {event['args']['name']}"
            yield event


def _traced_run_options(session, options):
    traced = config_pb2.RunOptions()
    if options is not None:
        traced.CopyFrom(options)
    # A full trace starts TensorFlow's profiler, which CPUs do not need.
    on_processors = {device.device_type for device in session.list_devices()} <= {"CPU", "XLA_CPU"}
    level = config_pb2.RunOptions.SOFTWARE_TRACE if on_processors else config_pb2.RunOptions.FULL_TRACE
    traced.trace_level = max(traced.trace_level, level)
    traced.output_partition_graphs = True
    return traced
