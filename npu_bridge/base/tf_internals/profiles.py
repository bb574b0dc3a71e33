"""Watches eager calls of functions, and profiles their operators. TensorFlow 2.15.1 and 2.21."""

from __future__ import annotations

import collections
import contextlib
import functools
import re
import time
from collections.abc import Iterator
from typing import Any, Callable

from npu_bridge.base.after_import import call_when_loaded, wrap_function
from npu_bridge.base.tf_internals.sessions import collected_function_graphs

_MARK = "npu_bridge_step"
# "matmul_1:MatMul", a name and a type. Events of the profiler's other sources have other names.
_OPERATOR = re.compile(r"([\w.][\w.>/\\-]*):([A-Za-z_]\w*)")
_ASYNC = "ExecutorState::ProcessAsync::"
# The callback of a step's last transfer can still run when the step has returned; its event is recorded when it ends.
_CALLBACK_SECS = 0.2
_DEVICE = "/job:localhost/replica:0/task:0/device:CPU:0"


def watch_calls(run_call: Callable[[Any, Callable], Any]) -> None:
    """Passes all eager calls of functions through `run_call(function, call)`; does not load TensorFlow.

    Checked in TF 2.15: `ConcreteFunction._call_flat`.
    """

    def call_flat(call, function, *arguments, **keywords):
        import tensorflow as tf

        bound = functools.partial(call, function, *arguments, **keywords)
        return run_call(function, bound) if tf.executing_eagerly() else bound()

    call_when_loaded(
        "tensorflow.python.eager.polymorphic_function.concrete_function",
        lambda module: wrap_function(module.ConcreteFunction, "_call_flat", call_flat),
    )


@contextlib.contextmanager
def collected_graphs() -> Iterator[list]:
    """Collects the optimized graphs of functions that are called inside the block for the first time.

    Returns:
      A list of GraphDefs, filled at the end of the block.
    """
    graphs: list = []
    with collected_function_graphs() as metadata:
        yield graphs
    graphs.extend(metadata.partition_graphs)


class CpuProfile:
    """A profile of the operators that this process runs on CPUs, from now on.

    Checked in TF 2.15: `_pywrap_profiler.ProfilerSession`, and the names of events in its trace.

    Raises:
      tf.errors.AlreadyExistsError: another profile is being made; TensorFlow makes one at a time.
    """

    def __init__(self):
        from tensorflow.python.profiler.internal import _pywrap_profiler

        self._begins_ns: dict[int, int] = {}
        self._session = _pywrap_profiler.ProfilerSession()
        self._session.start("", {})

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Marks the operators that run inside the block as one step."""
        from tensorflow.python.profiler.trace import Trace

        self._begins_ns[number] = time.time_ns()
        with Trace(_MARK, step_num=number):
            yield

    def stop(self) -> dict[int, Any]:
        """Ends the profile.

        Returns:
          For each step in ascending order, StepStats as those of a session run.
        """
        from tensorflow.tsl.profiler.protobuf.trace_events_pb2 import Trace

        time.sleep(_CALLBACK_SECS)
        events = Trace.FromString(self._session.stop()).trace_events
        marks = {int(event.args["step_num"]): event for event in events if event.name == _MARK}
        return {step: _step_stats(events, marks[step], self._begins_ns[step]) for step in sorted(marks)}


def _step_stats(events: Any, mark: Any, begin_ns: int) -> Any:
    """Returns StepStats of the operators that begin inside a mark, which began at `begin_ns` of the clock."""
    from tensorflow.core.framework.step_stats_pb2 import StepStats

    end_ps = mark.timestamp_ps + mark.duration_ps
    inside = [event for event in events if mark.timestamp_ps <= event.timestamp_ps < end_ps]
    stats = StepStats()
    device = stats.dev_stats.add(device=_DEVICE)
    for name, kind, thread, from_ps, to_ps in sorted(_list_operators(inside), key=lambda operator: operator[3]):
        start_ns = begin_ns + (from_ps - mark.timestamp_ps) // 1000
        length_ns = (to_ps - from_ps) // 1000
        device.node_stats.add(
            node_name=name,
            timeline_label=f"{name} = {kind}()",
            thread_id=thread,
            all_start_nanos=start_ns,
            all_start_micros=start_ns // 1000,
            all_end_rel_nanos=length_ns,
            all_end_rel_micros=length_ns // 1000,
        )
    return stats


def _list_operators(events: list) -> Iterator[tuple[str, str, int, int, int]]:
    """Yields name, type, thread, begin and end of each operator; an asynchronous one ends when it calls back."""
    started: dict[str, collections.deque] = collections.defaultdict(collections.deque)
    for event in sorted(events, key=lambda event: event.timestamp_ps):
        name = event.args["name"]
        if event.name == f"{_ASYNC}Start":
            started[name].append(event)
        elif event.name == f"{_ASYNC}Done" and started[name]:
            begin = started[name].popleft()
            yield name, begin.args["kernel_type"], begin.resource_id, begin.timestamp_ps, event.timestamp_ps
    for event in events:
        operator = _OPERATOR.fullmatch(event.args["long_name"] or event.name)
        if operator and operator[1] not in started:
            yield (*operator.groups(), event.resource_id, event.timestamp_ps, event.timestamp_ps + event.duration_ps)
