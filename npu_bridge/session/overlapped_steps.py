"""Trains several steps in a row on several ranks: one by one, or overlapping with the all-reduce of the step before.

Overlapping hides the forward pass behind the all-reduce, which saves time if the network is slow. So overlapping is
tried if ranks wait for the network after the backward pass, and all ranks keep the faster of the two ways. The results
of both ways are the same, bit for bit.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2

from npu_bridge.base import environment
from npu_bridge.base.session_wrapper import RunRequest, SessionEngine
from npu_bridge.base.terminal import logger
from npu_bridge.base.tf_internals.sessions import empty_buffer, read_content, run_options_buffer
from npu_bridge.collective.cost_model import LEAST_GAIN, LEAST_STEPS, LEAST_WAIT
from npu_bridge.collective.order_on_the_wire import (
    dependencies_for_order,
    gradient_all_reduces,
    measure_overlap,
    order_for_forward_pass,
    set_horovod_order,
)
from npu_bridge.collective.small_values import gather_values
from npu_bridge.graph.loop import InGraphLoop, NotLoopableError
from npu_bridge.graph.operators import computed_ops
from npu_bridge.graph.recorded import events_of

_LOG = logger(__name__)
# Python handles a signal between two calls of the session, and a machine that is reclaimed gives half a minute.
_LONGEST_CALL_SECS = 10.0
_TRIALS = 3
_RECORDED_STEPS = 4


class OverlappedSteps:
    """Trains steps of one kind in one session, one by one or overlapping, whichever is faster over all ranks.

    The first call of `train` trains one by one. The second call begins with a step whose operators are timed, to plan
    the order of the all-reduces. Then both ways take turns, until the faster one is known and kept.

    Attributes:
      is_recorded: whether to record the last overlapping steps of each call of `train`, once the faster way is known.
      record: RunMetadata of the last recorded steps; None if no steps were recorded.
    Args:
      step: the operators that make up a training step.
      fed: names of the tensors fed to the run.
      one_by_one: function that trains steps one by one; called with the arguments of `train`.
      make_loop: function of the control dependencies that order the all-reduces; returns the loop, and whether this
        call made the loop (otherwise an earlier session did).
    """

    def __init__(
        self,
        step: Sequence[tf.Operation],
        fed: Collection[str],
        one_by_one: Callable[[Any, SessionEngine, int, dict, int], None],
        make_loop: Callable[[Mapping], tuple[InGraphLoop, bool]],
    ):
        self._step = step
        self._ops = computed_ops(step, frozenset(fed))
        self._transfers = gradient_all_reduces(self._ops)
        self._one_by_one = one_by_one
        self._make_loop = make_loop
        self._loop: InGraphLoop | None = None
        self._calls = 0
        self._secs: dict[bool, list[float]] = {False: [], True: []}
        self._steps_per_call = 0
        self._overlaps: bool | None = None
        self._requested = environment.read_overlapped_steps()
        self.is_recorded = False
        self.record: config_pb2.RunMetadata | None = None

    def train(self, session: Any, engine: SessionEngine, count: int, feeds: dict, timeout_in_ms: int) -> None:
        """Trains `count` steps, the same number on every rank, with the values and the time limit of the run."""
        options = config_pb2.RunOptions(timeout_in_ms=timeout_in_ms)
        self._calls += 1
        if self._calls == 2 and self._requested is not False:
            self._plan_overlap(session, engine, feeds, options)
            count -= 1
        while count > 0:
            calls = max(round(count / (self._steps_per_call or count)), 1)
            steps = math.ceil(count / calls)
            overlaps = self._should_overlap(steps)
            start = time.perf_counter()
            if overlaps:
                self._train_overlapping(session, engine, steps, feeds, options)
            else:
                self._one_by_one(session, engine, steps, feeds, timeout_in_ms)
            self._record_duration(overlaps, steps, time.perf_counter() - start)
            count -= steps

    def _train_overlapping(self, session, engine, steps, feeds, options):
        def targets_and_feeds(count):
            return [self._loop.op], {**feeds, self._loop.count.ref(): np.int64(count)}

        # Recording would slow a trial down.
        recorded = min(steps, _RECORDED_STEPS) if self.is_recorded and self._overlaps else 0
        if steps > recorded:
            with run_options_buffer(options) as asked:
                engine.execute(session, RunRequest([], *targets_and_feeds(steps - recorded), asked))
        if recorded:
            self.record = _run_with_trace(session, engine, *targets_and_feeds(recorded), options)

    def _plan_overlap(self, session, engine, feeds, options):
        """Trains a step and times its operators. Then either all ranks make the overlapping loop, or no rank does."""
        start = time.perf_counter()
        record = _run_with_trace(session, engine, self._step, feeds, options)
        secs = time.perf_counter() - start
        events = {event.name: (event.begin, event.end) for event in events_of(record.step_stats)}
        measured = [measure_overlap(self._ops, transfers, events) for transfers in self._transfers]
        waiting = sum(late for _, late in measured) / 1e6
        gathered = gather_values([secs, waiting, [share for share, _ in measured]], "plan_of_overlapped_steps")
        secs, waiting = (max(values) for values in list(zip(*gathered))[:2])
        self._steps_per_call = int(_LONGEST_CALL_SECS / secs)
        if not self._requested and waiting < LEAST_WAIT * secs:
            self._set_and_log_choice(False, "the network takes no longer than the backward pass")
        elif not self._requested and self._steps_per_call < LEAST_STEPS:
            self._set_and_log_choice(False, f"a step takes more than {_LONGEST_CALL_SECS / LEAST_STEPS:g} s")
        else:
            shares = [statistics.mean(of_ranks) for of_ranks in zip(*(shares for *_, shares in gathered))]
            self._agree_on_loop_choice([order_for_forward_pass(*pair) for pair in zip(self._transfers, shares)])

    def _agree_on_loop_choice(self, orders):
        waits: dict = {}
        for order in orders:
            waits.update(dependencies_for_order(self._ops, order))
        reason, is_new = "", False
        try:
            self._loop, is_new = self._make_loop(waits)
        except (NotLoopableError, ValueError, TypeError, KeyError) as error:
            # The other errors come from unforeseen graphs, which train without overlap.
            reason = str(error)
        gathered = gather_values([reason, is_new], "loops_of_overlapped_steps")
        reasons = [reason for reason, _ in gathered if reason]
        if reasons:
            self._set_and_log_choice(False, reasons[0])
            return
        if any(is_new for _, is_new in gathered):
            for order in orders:
                set_horovod_order([self._loop.transfers[transfer.name] for transfer in order])
        if self._requested:
            self._set_and_log_choice(True, "NPU_OVERLAPPED_STEPS asks for it")

    def _should_overlap(self, steps):
        if self._loop is None or steps < LEAST_STEPS:  # the last step of a run is not among these
            return False
        return len(self._secs[True]) <= len(self._secs[False]) if self._overlaps is None else self._overlaps

    def _record_duration(self, overlaps, steps, secs):
        """Records how long steps took, and decides after enough trials.

        The first loop with overlap and the first without do not count, because TensorFlow prepares the graph for them.
        """
        if self._overlaps is not None or self._loop is None or steps < LEAST_STEPS:
            return
        self._secs[overlaps].append(secs / steps)
        if all(len(taken) > _TRIALS for taken in self._secs.values()):
            own = [statistics.median(self._secs[way][1:]) for way in (False, True)]
            before, after = map(sum, zip(*gather_values(own, "times_of_overlapped_steps")))
            self._set_and_log_choice(
                after < (1 - LEAST_GAIN) * before, f"so a step takes {after / before:.2f} of the time"
            )

    def _set_and_log_choice(self, is_overlapping, reason):
        self._overlaps = is_overlapping
        way = (
            "the next step begins while gradients are all-reduced"
            if is_overlapping
            else "steps are repeated one by one"
        )
        _LOG.info("iterations_per_loop: %s (%s).", way, reason)


def _run_with_trace(session, engine, targets, feeds, options):
    """Runs operators and returns the RunMetadata of the run."""
    traced = config_pb2.RunOptions(trace_level=config_pb2.RunOptions.SOFTWARE_TRACE, output_partition_graphs=True)
    traced.MergeFrom(options)
    with run_options_buffer(traced) as asked, empty_buffer() as gathered:
        engine.execute(session, RunRequest([], list(targets), feeds, asked, gathered))
        return config_pb2.RunMetadata.FromString(read_content(gathered))
