"""Trains steps of several ranks in a row: one by one, or so that the next begins while gradients are all-reduced.

The second way hides the forward pass behind the all-reduce, which gains where the network is slow. So it is tried if
ranks wait for the network after the backward pass, and all ranks keep the way that was faster for them together. The
results are the same, bit for bit.
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
from npu_bridge.base.session_wrapper import Request, SessionEngine
from npu_bridge.base.terminal import logger
from npu_bridge.base.tf_internals.sessions import empty_buffer, read_content, run_options_buffer
from npu_bridge.collective.cost_model import LEAST_GAIN, LEAST_WAIT
from npu_bridge.collective.exchanges import gather_values
from npu_bridge.collective.order_on_the_wire import (
    measure_exchange,
    order_by_need,
    teach_order,
    transfers_of_gradients,
    waits_of,
)
from npu_bridge.graph.loop import NotLoopableError
from npu_bridge.graph.operators import computed_ops
from npu_bridge.graph.overlapped_loop import OverlappedLoop
from npu_bridge.graph.recorded import events_of

_LOG = logger(__name__)
# Ours: Python handles a signal between two calls of the session, and a machine that is reclaimed gives half a minute.
_LONGEST_CALL_SECS = 10.0
# The last step of a call overlaps with no other, so a call of few steps gains little.
LEAST_STEPS = 4
_TRIALS = 3
_RECORDED_STEPS = 4


class OverlappedSteps:
    """Steps of one kind in one session, trained in the way that is faster on all ranks together.

    The first call trains one by one. The second begins with a step whose operators are timed, to plan the order of the
    all-reduces. Then both ways take turns, and the faster one stays.

    Attributes:
      is_recorded: whether to record the last overlapping steps of each call of `train`, once the trial is over.
      record: TensorFlow's record of the last steps that overlapped; None without one.
    Args:
      step: the operators that make up a training step.
      fed: names of the tensors fed to the run.
      one_by_one: trains steps one by one; called with the session, its engine, the number of steps and feeds.
      make_loop: makes the loop, or returns the loop of an earlier session; called with the control dependencies that
        order the all-reduces.
    """

    def __init__(
        self,
        step: Sequence[tf.Operation],
        fed: Collection[str],
        one_by_one: Callable[[Any, SessionEngine, int, dict], None],
        make_loop: Callable[[Mapping], tuple[OverlappedLoop, bool]],
    ):
        self._step = step
        self._ops = computed_ops(step, frozenset(fed))
        self._transfers = transfers_of_gradients(self._ops)
        self._one_by_one = one_by_one
        self._make_loop = make_loop
        self._loop: OverlappedLoop | None = None
        self._calls = 0
        self._secs: dict[bool, list[float]] = {False: [], True: []}
        self._steps_per_call = 0
        self._overlaps: bool | None = None
        self._asked = environment.overlapped_steps()
        self.is_recorded = False
        self.record: config_pb2.RunMetadata | None = None

    def train(self, session: Any, engine: SessionEngine, count: int, feeds: dict) -> None:
        """Trains `count` steps, the same number on every rank, with the values that are fed to the run."""
        self._calls += 1
        if self._calls == 2 and self._asked is not False:
            self._prepare(session, engine, feeds)
            count -= 1
        while count > 0:
            calls = max(round(count / (self._steps_per_call or count)), 1)
            steps = math.ceil(count / calls)
            overlaps = self._choose(steps)
            start = time.perf_counter()
            if overlaps:
                self._train_overlapping(session, engine, steps, feeds)
            else:
                self._one_by_one(session, engine, steps, feeds)
            self._took(overlaps, steps, time.perf_counter() - start)
            count -= steps

    def _train_overlapping(self, session, engine, steps, feeds):
        def part(count):
            return [self._loop.op], {**feeds, self._loop.count.ref(): np.int64(count)}

        # Recording would slow a trial down.
        recorded = min(steps, _RECORDED_STEPS) if self.is_recorded and self._overlaps else 0
        if steps > recorded:
            engine.execute(session, Request([], *part(steps - recorded)))
        if recorded:
            self.record = _recorded(session, engine, *part(recorded))

    def _prepare(self, session, engine, feeds):
        """Trains a step and times its operators; then all ranks make the loop, or none does."""
        start = time.perf_counter()
        record = _recorded(session, engine, self._step, feeds)
        secs = time.perf_counter() - start
        events = {event.name: (event.begin, event.end) for event in events_of(record.step_stats)}
        measured = [measure_exchange(self._ops, transfers, events) for transfers in self._transfers]
        waiting = sum(late for _, late in measured) / 1e6
        told = gather_values([secs, waiting, [share for share, _ in measured]], "plan_of_overlapped_steps")
        secs, waiting = (max(values) for values in list(zip(*told))[:2])
        self._steps_per_call = int(_LONGEST_CALL_SECS / secs)
        if not self._asked and waiting < LEAST_WAIT * secs:
            self._settle(False, "the network takes no longer than the backward pass")
        elif not self._asked and self._steps_per_call < LEAST_STEPS:
            self._settle(False, f"a step takes more than {_LONGEST_CALL_SECS / LEAST_STEPS:g} s")
        else:
            shares = [statistics.mean(of_ranks) for of_ranks in zip(*(shares for *_, shares in told))]
            self._make([order_by_need(*pair) for pair in zip(self._transfers, shares)])

    def _make(self, orders):
        waits: dict = {}
        for order in orders:
            waits.update(waits_of(self._ops, order))
        reason, is_new = "", False
        try:
            self._loop, is_new = self._make_loop(waits)
        except (NotLoopableError, ValueError, TypeError, KeyError) as error:
            # The other errors come from unforeseen graphs, which train without overlap.
            reason = str(error)
        told = gather_values([reason, is_new], "loops_of_overlapped_steps")
        reasons = [reason for reason, _ in told if reason]
        if reasons:
            self._settle(False, reasons[0])
            return
        if any(is_new for _, is_new in told):
            for order in orders:
                teach_order([self._loop.transfers[transfer.name] for transfer in order])
        if self._asked:
            self._settle(True, "NPU_OVERLAPPED_STEPS asks for it")

    def _choose(self, steps):
        if self._loop is None or steps < LEAST_STEPS:
            return False
        return len(self._secs[True]) <= len(self._secs[False]) if self._overlaps is None else self._overlaps

    def _took(self, overlaps, steps, secs):
        """Notes how long steps took. The first loop, for which TensorFlow prepares the graph, does not count."""
        if self._overlaps is not None or self._loop is None or steps < LEAST_STEPS:
            return
        self._secs[overlaps].append(secs / steps)
        if all(len(taken) > _TRIALS for taken in self._secs.values()):
            own = [statistics.median(self._secs[way][1:]) for way in (False, True)]
            before, after = map(sum, zip(*gather_values(own, "times_of_overlapped_steps")))
            self._settle(after < (1 - LEAST_GAIN) * before, f"so a step takes {after / before:.2f} of the time")

    def _settle(self, overlaps, why):
        self._overlaps = overlaps
        way = "the next step begins while gradients are all-reduced" if overlaps else "steps are repeated one by one"
        _LOG.info("iterations_per_loop: %s (%s).", way, why)


def _recorded(session, engine, targets, feeds):
    """Runs operators and returns TensorFlow's record of the run."""
    options = config_pb2.RunOptions(trace_level=config_pb2.RunOptions.SOFTWARE_TRACE, output_partition_graphs=True)
    with run_options_buffer(options) as asked, empty_buffer() as told:
        engine.execute(session, Request([], list(targets), feeds, asked, told))
        return config_pb2.RunMetadata.FromString(read_content(told))
