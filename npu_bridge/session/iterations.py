"""Several training steps in one `session.run`: hooks and fetches see the last one, the others come right before it.

A script names its training step by grouping it as `IterationOp`. Whenever a session that trains in loops is asked for
this op, all steps but the last are trained first, then the run goes on as it was asked for. So what is fetched is from
the last step, as is what hooks see, and all other runs of the session are what they were.

The steps before the last run inside the graph where the step can be copied into a loop (`rewrite/loop.py`), else one
by one through a prepared call of the session. That is nearly as fast: an empty one takes 12 µs, while a step of 30
operators took 0.14 ms in calls and 0.11 ms in the graph, and one of 6 ms the same in both; a run of a monitored session
with an Estimator's hooks adds 0.2 ms to a step (2 cores, TensorFlow 2.15). So a step that has a loop of its own or
exchanges gradients is prepared, not copied: then it goes on with the very operators of the graph. So is one that draws
seeded random numbers, if the session has not let the loop draw from the kernels of those operators (see
`rewrite/loop_draws.py`).

When data ends in the middle of a loop the error comes as in any run; the steps that were trained stay trained.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any, Callable

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2

from npu_bridge.graph.operators import computed_ops
from npu_bridge.options import of_graph
from npu_bridge.options.errors import message, say_once
from npu_bridge.precision import one_decision, precision_of_session
from npu_bridge.rewrite import InGraphLoop, NotLoopableError, put_in_loop
from npu_bridge.session.loop_threads import POOL, LoopThreads
from npu_bridge.tf_internals.graphs import opened_for_changes
from npu_bridge.tf_internals.sessions import content_of, run_metadata_buffer, run_options_buffer

_LOG = logging.getLogger(__name__)
_KEY = ("npu_bridge", "iteration_ops")  # TensorFlow exports collections with text keys only
_LOOPS_KEY = ("npu_bridge", "iteration_loops")
ITERATION_OP = "IterationOp"
# Ours: Python hears of a signal between two calls of the session.
_LONGEST_CALL_SECS = 1.0
_FIRST_STEPS = 8


def name_step(train_op: Any) -> tf.Operation:
    """Groups a training step as the op that sessions repeat.

    Args:
      train_op: an operation or a tensor.
    Returns:
      The op named `IterationOp`; that of a second step gets a number behind it.
    """
    with tf.name_scope(""), tf.control_dependencies(None):
        op = tf.group(train_op, name=ITERATION_OP)
    op.graph.add_to_collection(_KEY, op.name)
    return op


def train_in_loops(session: Any, steps_per_run: int) -> None:
    """Lets a session train several steps in each run that asks for an `IterationOp`.

    Args:
      session: a live session; its class becomes a subclass of what it was.
      steps_per_run: training steps in a run, at least 1; may be changed by calling again.
    Graph: what `put_in_loop` adds, at the first such run; also to a finalized graph.
    Ranks: local; all ranks need the same number.
    """
    _compare_with_options(session.graph, steps_per_run)
    if not isinstance(session, _LoopingSession):
        if steps_per_run == 1:
            return
        session._npu_bridge_loops = _Loops(session)
        session.__class__ = type(type(session).__name__, (_LoopingSession, type(session)), {})
    session._npu_bridge_loops.steps_per_run = steps_per_run


def steps_per_run(session: Any) -> int:
    """The training steps in one run of a session; 1 where nobody asked for more."""
    return session._npu_bridge_loops.steps_per_run if isinstance(session, _LoopingSession) else 1


class _LoopingSession:
    """Mixed into a session's class, in front of everything that watches single runs."""

    def _do_run(self, handle, target_list, fetch_list, feed_dict, options, run_metadata):
        run = super()._do_run
        loops = self._npu_bridge_loops
        earlier = None
        if handle is None and loops.steps_per_run > 1:
            asked = [*target_list, *fetch_list]
            earlier = loops.earlier_steps(asked, feed_dict, run, super()._make_callable_from_options)
        if earlier is None:
            return run(handle, target_list, fetch_list, feed_dict, options, run_metadata)
        with one_decision(self):
            earlier.train(loops.steps_per_run - 1, feed_dict, run)
            return run(handle, target_list, fetch_list, feed_dict, options, run_metadata)


class _Loops:
    """What a session repeats."""

    def __init__(self, session: tf.compat.v1.Session):
        self.steps_per_run = 1
        self._session = session
        self._steps_of_run: dict[tuple, tuple[str, ...]] = {}
        self._earlier: dict[tuple, _Copied | _Prepared | _Fed] = {}

    def earlier_steps(self, asked: list, feeds: dict, run: Callable, make_callable: Callable) -> Any:
        """The steps before the last one of a run; None for a run that does not train.

        Args:
          asked: the operations and tensors of the run.
          feeds: as `_do_run` gets them.
          run, make_callable: the session's own.
        """
        fed = tuple(sorted(reference.deref().name for reference in feeds))
        kind = (tuple(element.name for element in asked), fed)
        if kind not in self._steps_of_run:
            self._steps_of_run[kind] = self._named_steps(asked, fed)
        step = self._steps_of_run[kind]
        if not step:
            return None
        if (step, fed) not in self._earlier:
            self._earlier[step, fed] = self._prepare(step, fed, feeds, run, make_callable)
        return self._earlier[step, fed]

    def _named_steps(self, asked, fed):
        names = {ITERATION_OP, *self._session.graph.get_collection(_KEY)}
        return tuple(op.name for op in computed_ops(asked, frozenset(fed)) if op.name in names)

    def _prepare(self, names, fed, feeds, run, make_callable):
        graph = self._session.graph
        step = [graph.get_operation_by_name(name) for name in names]
        if any(op.type == "OneShotIterator" for op in graph.get_operations()):
            say_once(logging.INFO, "iterations_per_loop: a one-shot iterator is fine here; the NPU stack rejects it.")
        reason, is_only_random = self._reason_against_copying(), False
        if not reason:
            try:
                loop = _loop_of(graph, step, fed)
                if not loop.shared or self._shares_kernels(loop, feeds, run):
                    return _Copied(loop)
                reason, is_only_random = f"this session does not share the state of {loop.shared[0]}", True
            except NotLoopableError as error:
                reason, is_only_random = str(error), error.is_only_random
        _LOG.info("iterations_per_loop: steps are repeated one by one, as %s.", reason)
        # Steps that wait, for other ranks or for a queue, are left to the pool.
        return _Fed(step) if fed else _Prepared(step, make_callable, LoopThreads(None if is_only_random else POOL))

    def _shares_kernels(self, loop, feeds, run):
        """Whether a run of the loop has the random operators of the graph; nothing is trained to find out."""
        if self._session.sess_str or len(self._session.list_devices()) > 1:
            return False  # kernels are kept for each device, and their names looked up in sessions of this process
        try:
            with run_metadata_buffer() as metadata:
                with _run_options(output_partition_graphs=True) as options:
                    run(None, [loop.op], [], {**feeds, loop.count.ref(): np.int64(0)}, options, metadata)
                prepared = tf.compat.v1.RunMetadata.FromString(content_of(metadata))
        except tf.errors.InvalidArgumentError:  # a session may refuse to show what it has prepared
            return False
        return {node.name for graph in prepared.partition_graphs for node in graph.node}.issuperset(loop.shared)

    def _reason_against_copying(self):
        if precision_of_session(self._session) is not None:
            return "the precision of this session is decided for each run"
        others = {device.device_type for device in self._session.list_devices()} - {"CPU"}
        return f"this machine has devices of type {', '.join(sorted(others))}" if others else ""


class _Copied:
    """Steps in a loop of the graph."""

    def __init__(self, loop: InGraphLoop):
        self._loop = loop
        self._threads = LoopThreads()
        self._steps_per_call = _FIRST_STEPS

    def train(self, count: int, feeds: dict, run: Callable) -> None:
        """Trains `count` steps."""
        while count > 0:
            steps = min(count, self._steps_per_call)
            choice = self._threads.choose()
            start = time.perf_counter()
            with _run_options(inter_op_thread_pool=choice) as options:
                run(None, [self._loop.op], [], {**feeds, self._loop.count.ref(): np.int64(steps)}, options, None)
            secs = time.perf_counter() - start
            self._threads.took(choice, steps, secs)
            self._steps_per_call = max(int(_LONGEST_CALL_SECS * steps / secs), 1)
            count -= steps


class _Prepared:
    """Steps one by one through a call that is prepared once, or once for each choice of threads."""

    def __init__(self, step: Iterable[tf.Operation], make_callable: Callable, threads: LoopThreads):
        self._targets = [op.name for op in step]
        self._make_callable = make_callable
        self._threads = threads
        self._calls: dict[int, Callable] = {}

    def train(self, count: int, feeds: dict, run: Callable) -> None:
        """Trains `count` steps."""
        choice = self._threads.choose()
        if choice not in self._calls:
            run_options = tf.compat.v1.RunOptions(inter_op_thread_pool=choice)
            self._calls[choice] = self._make_callable(
                config_pb2.CallableOptions(target=self._targets, run_options=run_options)
            )
        call = self._calls[choice]
        start = time.perf_counter()
        for _ in range(count):
            call()
        self._threads.took(choice, count, time.perf_counter() - start)


class _Fed:
    """Steps one by one, each with the values that are fed to the run."""

    def __init__(self, step: list[tf.Operation]):
        self._step = step

    def train(self, count: int, feeds: dict, run: Callable) -> None:
        """Trains `count` steps."""
        for _ in range(count):
            run(None, self._step, [], feeds, None, None)


def _run_options(**settings):
    return run_options_buffer(tf.compat.v1.RunOptions(**settings))


def _loop_of(graph, step, fed):
    """The loop of these steps: a new one, or that of an earlier session."""
    known = graph.get_collection_ref(_LOOPS_KEY)
    for asked, loop in known:
        if asked == (step, fed):
            return loop
    with opened_for_changes(graph):
        loop = put_in_loop(graph, step, fed)
        known.append(((step, fed), loop))
        return loop


def _compare_with_options(graph, steps_per_run):
    options = of_graph.options_of(graph)
    if options is not None and options.iterations_per_loop != steps_per_run:
        problem = "the session and the loop variable differ"
        got = f"{options.iterations_per_loop} in the options of the session and {steps_per_run} in the variable"
        mend = "The variable's value is used; set the option too."
        text = message("iterations_per_loop", problem, "the same number in both", got, mend)
        say_once(logging.WARNING, text)
