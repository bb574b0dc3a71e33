"""Implements `iterations_per_loop`: a `session.run` of the training step trains N steps and fetches from the last.

A script names its training step by grouping it as `IterationOp`. When a session that trains in loops runs this op, it
first trains all steps but the last, and then makes the requested run. So fetches and hooks see the last step. Runs
without this op are not changed. If the data ends in the middle of a loop, the usual error is raised, and the updates of
the steps made so far stay.

The steps before the last are executed in a loop of the graph, if the step can be copied into a loop (`graph/loop.py`).
Otherwise they are executed one by one through a prepared call of the session, or, on several ranks, overlapping
(`overlapped_steps.py`). One by one is nearly as fast: a linear model took 0.031 ms a step in the graph and 0.039 ms in
prepared calls, small networks with Adam 0.10 and 0.11 ms. A run of a monitored session with an Estimator's hooks adds
0.2 ms to a step (2 cores, TensorFlow 2.15).
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Sequence
from typing import Any, Callable

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2

from npu_bridge.base.errors import message, say_once
from npu_bridge.base.session_wrapper import EnginePlace, RunRequest, SessionEngine, add_engine, find_engine
from npu_bridge.base.terminal import logger
from npu_bridge.base.tf_internals.graphs import allow_graph_changes
from npu_bridge.base.tf_internals.sessions import read_content, run_options_buffer
from npu_bridge.collective.order_on_the_wire import gradient_all_reduces
from npu_bridge.graph.loop import InGraphLoop, NotLoopableError, put_in_loop
from npu_bridge.graph.operators import computed_ops
from npu_bridge.graph.overlapped_loop import put_in_overlapped_loop
from npu_bridge.graph.run import SessionRun, run_of
from npu_bridge.options import of_graph
from npu_bridge.session.overlapped_steps import OverlappedSteps
from npu_bridge.session.precision import precision_of_session, sharing_one_policy

_LOG = logger(__name__)
_KEY = ("npu_bridge", "iteration_ops")  # TensorFlow exports collections with text keys only
_LOOPS_KEY = ("npu_bridge", "iteration_loops")
ITERATION_OP = "IterationOp"
# Python handles a signal only between two calls of the session.
_LONGEST_CALL_SECS = 1.0
_FIRST_STEPS = 8
POOL, CALLER = 0, -1  # as RunOptions.inter_op_thread_pool names them
# Three trials each. A step that takes longer than this gains nothing from saving a thread switch, and may have
# work for several threads.
_TRIALS = 3
_LONGEST_STEP_SECS = 1e-3


def name_step(train_op: Any) -> tf.Operation:
    """Groups a training step (an operation or a tensor) as an op named `IterationOp`, which sessions repeat.

    The op of a second training step gets a number after its name.
    """
    with tf.name_scope(""), tf.control_dependencies(None):
        op = tf.group(train_op, name=ITERATION_OP)
    op.graph.add_to_collection(_KEY, op.name)
    return op


def train_in_loops(session: Any, steps_per_run: int) -> None:
    """Makes a session train several steps in each run of an `IterationOp`; another call changes the number of steps.

    Graph: the operators of `put_in_loop`, at the first such run; also in a finalized graph.
    Ranks: local; all ranks need the same number.
    """
    _warn_if_options_differ(session.graph, steps_per_run)
    loops = find_engine(session, _LoopEngine)
    if loops is None:
        if steps_per_run == 1:
            return
        loops = _LoopEngine()
        add_engine(session, loops)
    loops.steps_per_run = steps_per_run


def steps_per_run(session: Any, run: SessionRun | None = None) -> int:
    """Returns the number of training steps in one run of a session; 1 by default.

    Args:
      run: the run; a run without an `IterationOp` trains a single step. None means a run with an `IterationOp`.
    """
    loops = find_engine(session, _LoopEngine)
    if loops is None or (run is not None and not _iteration_ops_of(run, session.graph)):
        return 1
    return loops.steps_per_run


def take_run_metadata(session: Any) -> config_pb2.RunMetadata | None:
    """Returns and forgets the trace of the last traced run with overlapping steps; None without such a run."""
    loops = find_engine(session, _LoopEngine)
    return loops.take_run_metadata() if loops is not None else None


class _LoopEngine(SessionEngine):
    """A layer around session runs of several steps: trains all but the last step, then makes the run for the last."""

    place = EnginePlace.LOOPS
    needs_all_runs = True

    def __init__(self):
        self.steps_per_run = 1
        self._steps_of_run: dict[tuple, tuple[str, ...]] = {}
        self._earlier_steps: dict[tuple, _InGraphStepTrainer | _SingleStepTrainer | OverlappedSteps] = {}

    def execute(self, session, request):
        earlier = self._earlier_steps_of(session, request) if self.steps_per_run > 1 else None
        if earlier is None:
            return self.inner.execute(session, request)
        options = config_pb2.RunOptions.FromString(read_content(request.options) if request.options else b"")
        if isinstance(earlier, OverlappedSteps):
            earlier.is_recorded = options.trace_level != config_pb2.RunOptions.NO_TRACE
        with sharing_one_policy(session):
            earlier.train(session, self.inner, self.steps_per_run - 1, request.feeds, options.timeout_in_ms)
            return self.inner.execute(session, request)

    def take_run_metadata(self):
        """Returns and forgets the RunMetadata of recorded overlapping steps; None if no steps were recorded."""
        for steps in self._earlier_steps.values():
            if isinstance(steps, OverlappedSteps) and steps.record is not None:
                record, steps.record = steps.record, None
                return record
        return None

    def _earlier_steps_of(self, session, request):
        """Returns the object that trains all steps of a run but the last; None if the run does not train."""
        fed = tuple(sorted(tensor.name for tensor in request.fed))
        kind = (tuple(element.name for element in request.requested_elements), fed)
        if kind not in self._steps_of_run:
            run = run_of(session.graph, request.requested_elements, fed)
            self._steps_of_run[kind] = _iteration_ops_of(run, session.graph)
        step = self._steps_of_run[kind]
        if not step:
            return None
        if (step, fed) not in self._earlier_steps:
            self._earlier_steps[step, fed] = self._make_earlier_steps(session, step, fed)
        return self._earlier_steps[step, fed]

    def _make_earlier_steps(self, session, names, fed):
        graph = session.graph
        step = [graph.get_operation_by_name(name) for name in names]
        if any(op.type == "OneShotIterator" for op in graph.get_operations()):
            say_once(logging.INFO, "iterations_per_loop: a one-shot iterator is fine here; the NPU stack rejects it.")
        reason, is_only_random = _reason_against_copying_step(session), False
        if not reason:
            try:
                return _InGraphStepTrainer(_make_loop(graph, step, fed))
            except NotLoopableError as error:
                reason, is_only_random = str(error), error.is_only_random
        # A step that waits for other ranks or for a queue stays in the pool.
        one_by_one = _SingleStepTrainer(names, fed, LoopThreadChoice(None if is_only_random else POOL))
        if not _reason_against_copying_step(session) and gradient_all_reduces(computed_ops(step, fed)):
            return OverlappedSteps(
                step, fed, one_by_one.train, functools.partial(_make_overlapped_loop, graph, step, fed)
            )
        _LOG.info("iterations_per_loop: steps are repeated one by one, as %s.", reason)
        return one_by_one


class _InGraphStepTrainer:
    """Trains steps in a loop of the graph."""

    def __init__(self, loop: InGraphLoop):
        self._loop = loop
        self._threads = LoopThreadChoice()
        self._steps_per_call = _FIRST_STEPS

    def train(self, session: Any, engine: SessionEngine, count: int, feeds: dict, timeout_in_ms: int) -> None:
        """Trains `count` steps, with the values and the time limit of the run; 0 is no limit."""
        while count > 0:
            steps = min(count, self._steps_per_call)
            choice = self._threads.choose()
            feeds = {**feeds, self._loop.count.ref(): np.int64(steps)}
            start = time.perf_counter()
            asked = tf.compat.v1.RunOptions(inter_op_thread_pool=choice, timeout_in_ms=timeout_in_ms)
            with run_options_buffer(asked) as options:
                engine.execute(session, RunRequest([], [self._loop.op], feeds, options))
            secs = time.perf_counter() - start
            self._threads.record_duration(choice, steps, secs)
            self._steps_per_call = max(int(_LONGEST_CALL_SECS * steps / secs), 1)
            count -= steps


class _SingleStepTrainer:
    """Trains steps one by one through prepared calls of the session; each choice of threads has its own call."""

    def __init__(self, step: Sequence[str], fed: Sequence[str], threads: LoopThreadChoice):
        self._step = step
        self._fed = fed
        self._threads = threads
        self._calls: dict[tuple[int, int], Callable] = {}

    def train(self, session: Any, engine: SessionEngine, count: int, feeds: dict, timeout_in_ms: int) -> None:
        """Trains `count` steps, with the values and the time limit of the run; 0 is no limit."""
        choice = self._threads.choose()
        if (choice, timeout_in_ms) not in self._calls:
            run_options = tf.compat.v1.RunOptions(inter_op_thread_pool=choice, timeout_in_ms=timeout_in_ms)
            asked = config_pb2.CallableOptions(feed=self._fed, target=self._step, run_options=run_options)
            self._calls[choice, timeout_in_ms] = engine.prepare_call(session, asked)
        call = self._calls[choice, timeout_in_ms]
        values = {reference.deref().name: value for reference, value in feeds.items()}
        arguments = [values[name] for name in self._fed]
        start = time.perf_counter()
        for _ in range(count):
            call(*arguments)
        self._threads.record_duration(choice, count, time.perf_counter() - start)


class LoopThreadChoice:
    """Chooses the threads for repeated small steps: TensorFlow's inter-op pool, or the calling thread alone.

    Tries both in turns and keeps the choice whose best loop was faster; `fixed_choice` is a choice made without trials.
    Handing a small operator to another thread takes longer than computing it: a step of 0.14 ms took 0.09 ms in the
    calling thread (2 cores, TensorFlow 2.15). Larger steps are faster with the pool. Both choices compute the same
    results.
    """

    def __init__(self, fixed_choice: int | None = None):
        self._has_warmed_up = False
        self._secs: dict[int, list[float]] = {POOL: [], CALLER: []}
        self._settled = fixed_choice

    def choose(self) -> int:
        """Returns the choice for the next loop: `POOL` or `CALLER`."""
        if self._settled is not None:
            return self._settled
        return POOL if len(self._secs[POOL]) <= len(self._secs[CALLER]) else CALLER

    def record_duration(self, thread_choice: int, steps: int, secs: float) -> None:
        """Records how long a loop took, except for the first loop, in which TensorFlow prepares the graph."""
        if self._settled is not None:
            return
        if not self._has_warmed_up:
            self._has_warmed_up = True
            return
        self._secs[thread_choice].append(secs / steps)
        if min(self._secs[POOL], default=0.0) > _LONGEST_STEP_SECS:
            self._settled = POOL
        elif len(self._secs[CALLER]) == _TRIALS:
            self._settled = min(self._secs, key=lambda each: min(self._secs[each]))


def _iteration_ops_of(run, graph):
    """Returns the names of the training steps in a run that a loop repeats."""
    names = {ITERATION_OP, *graph.get_collection(_KEY)}
    return tuple(op.name for op in run.ops if op.name in names)


def _reason_against_copying_step(session):
    if precision_of_session(session) is not None:
        return "the precision of this session is decided for each run"
    others = {device.device_type for device in session.list_devices()} - {"CPU"}
    return f"this machine has devices of type {', '.join(sorted(others))}" if others else ""


def _make_loop(graph, step, fed_names):
    """Returns the loop of these steps: the loop that an earlier session made, or a new one."""
    return _find_or_make_loop(graph, (step, fed_names), lambda: put_in_loop(graph, step, fed_names))[0]


def _make_overlapped_loop(graph, step, fed_names, waits):
    """Returns a loop in which steps overlap, and whether this call made the loop; an existing loop ignores `waits`."""
    return _find_or_make_loop(
        graph, (step, fed_names, "overlapped"), lambda: put_in_overlapped_loop(graph, step, fed_names, waits)
    )


def _find_or_make_loop(graph, loop_key, make_loop):
    known = graph.get_collection_ref(_LOOPS_KEY)
    for earlier, loop in known:
        if earlier == loop_key:
            return loop, False
    with allow_graph_changes(graph):
        known.append((loop_key, make_loop()))
        return known[-1][1], True


def _warn_if_options_differ(graph, steps_per_run):
    options = of_graph.options_of(graph)
    if options is not None and options.iterations_per_loop != steps_per_run:
        problem = "the session and the loop variable differ"
        got = f"{options.iterations_per_loop} in the options of the session and {steps_per_run} in the variable"
        fix = "The variable's value is used; set the option too."
        text = message("iterations_per_loop", problem, "the same number in both", got, fix)
        say_once(logging.WARNING, text)
