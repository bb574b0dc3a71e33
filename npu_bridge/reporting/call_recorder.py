"""Records traces of training steps that are calls of functions: `model.fit`, and loops that call a `tf.function`."""

from __future__ import annotations

import atexit
import contextlib
import weakref
from typing import Any, Callable

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2

from npu_bridge.base.secondary_files import NonFatalOutput
from npu_bridge.base.tf_internals.profiles import CpuProfile, collected_graphs
from npu_bridge.reporting.step_recorder import StepRecorder


class CallRecorder:
    """Profiles certain calls of functions that update variables by a Keras optimizer.

    Call n of such functions, from 0, is step n. The profile begins with the first of the steps, and ends with the last.

    Args:
      recorder: gets the traces, and writes them.
    """

    def __init__(self, recorder: StepRecorder):
        self._recorder = recorder
        self._calls = 0
        # The functions that train, being built or complete, and the optimized graphs of those that were called.
        self._graphs: weakref.WeakKeyDictionary[Any, list] = weakref.WeakKeyDictionary()
        self._called: dict[int, list] = {}  # these graphs, by step
        self._profile: CpuProfile | None = None
        self._secondary = NonFatalOutput(f"the timeline of rank {recorder.rank}", (ValueError, tf.errors.OpError))
        atexit.register(self.finish)  # before `recorder.finish`, which was registered earlier

    def record_update(self) -> None:
        """Notes that the functions now being traced train; called before an optimizer updates variables."""
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        while graph is not None:
            self._graphs.setdefault(graph, [])
            graph = getattr(graph, "outer_graph", None)

    def record_call(self, function: Any, call: Callable[[], Any]) -> Any:
        """Calls a function, profiled if the call is a step to record."""
        graphs = self._graphs.get(function.graph)
        if graphs is None or self._recorder.is_over:
            return call()
        step, self._calls = self._calls, self._calls + 1
        self._recorder.record_step_number(step)
        if step in self._recorder.steps and self._profile is None:
            self._secondary.attempt(self._start)
        profiled: Any = self._profile.step(step) if self._profile is not None else contextlib.nullcontext()
        collecting: Any = contextlib.nullcontext([]) if graphs else collected_graphs()
        with collecting as collected, profiled:
            outcome = call()
        graphs.extend(collected)
        self._called[step] = graphs
        if step >= self._recorder.steps[-1]:
            self.finish()
        return outcome

    def _start(self):
        if tf.config.list_logical_devices("GPU"):
            raise ValueError("function calls are recorded on CPUs only; to profile a GPU, use TensorBoard")
        self._profile = CpuProfile()

    def finish(self) -> None:
        """Ends the profile and writes the traces; has no effect if no function has trained, or at a second call."""
        atexit.unregister(self.finish)
        if self._calls and not self._recorder.is_over:
            self._secondary.attempt(self._store_records)
            self._recorder.finish()
        self._called.clear()

    def _store_records(self):
        if self._profile is not None:
            for step, stats in self._profile.stop().items():
                self._recorder.keep_step_record(
                    step, config_pb2.RunMetadata(step_stats=stats, partition_graphs=self._called[step])
                )
