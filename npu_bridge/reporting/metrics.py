"""Collects the numbers of a training every few steps, for a writer, by a hook for sessions or a callback for Keras."""

from __future__ import annotations

import math
import time
from typing import Any, Callable, NamedTuple

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base.arguments import check_count
from npu_bridge.base.machine import current_memory_bytes
from npu_bridge.base.secondary_files import NonFatalOutput
from npu_bridge.base.train_functions import TrainedBatches
from npu_bridge.gradients.arithmetic import gradient_values, sum_in_order
from npu_bridge.gradients.collections import gradients_of
from npu_bridge.reporting.keras_numbers import FirstEpochCallback, FittedSteps, numbers_in
from npu_bridge.reporting.step_hook import Observation, StepHook
from npu_bridge.reporting.straggler_hook import latest_comparison
from npu_bridge.reporting.stragglers import slowest_rank_metrics
from npu_bridge.session import steps_per_run

_NORM = "gradient_norm"
# The defaults: every step of a short run, sixty of a hundred steps, 150 of a thousand steps.
_ALL_OF_THE_FIRST, _MOST_STEPS_BETWEEN = 20, 100
# Entries wait this long, as writing costs more than computing them.
_SECS_BETWEEN_WRITES = 2.0


class MetricsHook(StepHook):
    """A hook that passes the numbers of a training, such as loss, learning rate, pace and memory, to a writer.

    The numbers are `loss`, `loss_scale`, `skipped_steps`, `learning_rate`, `gradient_norm`, `steps_per_sec`,
    `samples_per_sec` (if the graph shows the number of samples in a step) and `memory_mb` (memory of this process). The
    precision is passed, too. If a `StragglerHook` compares ranks, there are also `slowest_rank`, `slowest_rank_own_ms`,
    `other_ranks_own_ms` (median) and `waiting_for_slowest_rank` (a fraction of the time). `skipped_steps` begins at 0
    in each session, also in a resumed training.

    The gradient norm is the norm of the applied gradients, which are averaged, unscaled and clipped. There is no norm
    for a skipped step or the second step of a session, nor with `iterations_per_loop` above 1, where a run shows only
    its last step. An accumulated update has its norm in the entry of its last batch. If this batch has no entry, the
    norm is in the last entry before it.

    Entries are passed to the writer at most every two seconds, several at a time, and when the session ends.

    Args:
      writer: a writer, such as a `CsvWriter`; `metric_writers.py` describes its methods.
      every_n_steps: steps between two entries; the first step has an entry, too. None: every step at first, then fewer
        and fewer: sixty of the first hundred, one in a hundred after five thousand; and the last step.
      loss: tensor or name, see `StepHook`.
      clock: returns seconds, never going backwards.
      most_steps: largest number of steps between two entries if `every_n_steps` is None.
    Raises:
      ValueError: `every_n_steps` is below 1.
    Graph: the operators of the norm, which run only in steps that are written.
    Ranks: local; only rank 0 writes.
    """

    def __init__(
        self,
        writer: Any,
        every_n_steps: int | None = 100,
        loss: tf.Tensor | str | None = None,
        clock: Callable[[], float] = time.monotonic,
        most_steps: int = _MOST_STEPS_BETWEEN,
    ):
        super().__init__(loss)
        self._entries = _EntryCollector(type(self).__name__, writer, every_n_steps, clock, most_steps)
        self._norm: Any = None
        self._last_norm: float | None = None
        self._loops = self._lacks_norm = self._must_write = False
        self._skipped = 0

    def begin(self):
        """Finds the tensors and the rank."""
        super().begin()
        self._entries.begin()
        gradients = gradients_of(tf.compat.v1.get_default_graph()) if self._entries.writes else []
        with tf.name_scope("gradient_norm"):
            self._norm = _global_gradient_norm(gradients) if gradients else None

    def after_create_session(self, session, coord):
        """Starts the metric entries on rank 0, and finds out whether a run has several steps."""
        del coord
        self._loops = steps_per_run(session) > 1
        self._lacks_norm = self._must_write = False
        self._skipped = 0
        if self._entries.writes:
            self._entries.start_at_step(self.read_step(session), self.samples_per_step)

    def before_run(self, run_context):
        """Fetches the tensors on rank 0, and the gradient norm if the step has an entry."""
        if not self._entries.writes:
            return None
        asked = super().before_run(run_context)
        # TensorFlow prepares a graph anew for each set of fetches. The first three runs use all sets that occur:
        # with Estimator's summaries, without the norm, and with it.
        is_needed = self._entries.is_due or self._lacks_norm
        may_fetch = not self._loops and is_needed and not self._entries.is_second_run
        step = self.step_in(run_context)
        if self._norm is None or not may_fetch or step is None or not self._is_of_last_optimizer(step):
            return asked
        return tf.estimator.SessionRunArgs({**(asked.fetches if asked else {}), _NORM: self._norm})

    def after_run(self, run_context, run_values):
        """Keeps the gradient norm for `on_step`."""
        if self._entries.writes:
            norm = (run_values.results or {}).get(_NORM)
            self._last_norm = None if norm is None else float(norm)
            super().after_run(run_context, run_values)

    def on_step(self, session, observation: Observation) -> None:
        """Adds an entry if the step is due, and writes entries that have waited long enough."""
        self._skipped += observation.skipped
        is_due, steps = self._entries.is_due, steps_per_run(session)
        self._entries.count(steps, 0 if observation.skipped else steps)
        values = {
            "loss": observation.loss,
            "loss_scale": observation.loss_scale,
            "skipped_steps": self._skipped if "skipped" in self._fetches else None,
            "learning_rate": observation.learning_rate,
            _NORM: self._last_norm if self._has_decided else None,
            **slowest_rank_metrics(latest_comparison(self._graph)),
        }
        if is_due:
            self._must_write |= self._entries.add_entry(values, self._skipped, observation.precision)
            self._lacks_norm = self._norm is not None and not self._has_decided
        else:
            self._entries.keep_if_last(values, self._skipped, observation.precision)
            if self._lacks_norm and self._has_decided:  # the last batch of the update that the latest entry is part of
                self._entries.add_to_latest({_NORM: self._last_norm})
                self._lacks_norm = False
        if self._must_write:
            self._entries.write(self.read_step(session), keeps_latest=self._lacks_norm)
            self._must_write = False

    def exclude_secs(self, secs: float) -> None:
        """Excludes some seconds since the last entry (an evaluation, say) from the steps per second."""
        self._entries.paused += secs

    def end(self, session):
        """Writes the last entries."""
        if self._entries.writes:
            self._entries.add_last_entry()
            self._entries.write(self.read_step(session))
        self.close()

    def close(self) -> None:
        """Writes the last entries; needed if an error ends the training, as `end` is not called then."""
        self._entries.close()


class MetricsCallback(FirstEpochCallback):
    """A callback that passes to a writer the metrics of `model.fit` and the numbers of `MetricsHook`.

    The gradient norm is not passed.

    Args:
      writer: as in `MetricsHook`.
      every_n_steps: batches between two entries, as in `MetricsHook`.
      clock: returns seconds, never going backwards.
    Raises:
      ValueError: `every_n_steps` is below 1.
    Ranks: local; only rank 0 writes.
    Example:
      model.fit(dataset, callbacks=npu_callbacks_append([MetricsCallback(CsvWriter("out/numbers.csv"))]))
    """

    def __init__(self, writer: Any, every_n_steps: int | None = 100, clock: Callable[[], float] = time.monotonic):
        super().__init__()
        self._entries = _EntryCollector(type(self).__name__, writer, every_n_steps, clock)
        self._steps, self._batches = FittedSteps(), TrainedBatches()

    def begin(self):
        self._batches.begin_fit(self.model)
        self._entries.begin()
        if self._entries.writes:
            self._entries.start_at_step(self._steps.begin(self.model).step)

    def on_train_batch_end(self, batch, logs=None):
        if not self._entries.writes:
            return
        is_due, batches = self._entries.is_due, self._batches.count_new()
        self._entries.count(batches, batches)
        if not is_due:
            self._entries.keep_if_last(numbers_in(logs))
            return
        step, values = self._read_numbers()
        values = {**numbers_in(logs), **values}
        self._entries.set_step(step)
        if self._entries.add_entry(values, values["skipped_steps"] or 0):
            self._entries.write(step)

    def on_test_begin(self, logs=None):
        self._entries.pause_timing()

    def on_test_end(self, logs=None):
        self._entries.resume_timing()

    def on_train_end(self, logs=None):
        super().on_train_end(logs)
        if self._entries.writes:
            step, values = self._read_numbers()
            self._entries.set_step(step)
            self._entries.add_last_entry(values, values["skipped_steps"] or 0)
        self._entries.close()

    def _read_numbers(self):
        values = self._steps.read()._asdict()
        return values.pop("step"), values


class _MetricEntry(NamedTuple):
    """The numbers of one step, with its time, and the number of updates, runs and skipped steps up to this step."""

    updates: int
    runs: int
    skipped: float
    time: float
    values: dict[str, float | None]
    precision: str | None


class _EntryCollector:
    """Chooses the steps that get an entry, collects their numbers, and passes several entries at once to a writer.

    The global step is read when entries are written, as reading takes a session run; between writes, steps are counted.
    """

    def __init__(
        self,
        owner: str,
        writer: Any,
        every_n_steps: int | None,
        clock: Callable[[], float],
        most_steps: int = _MOST_STEPS_BETWEEN,
    ):
        if every_n_steps is not None:
            check_count(owner, "every_n_steps", every_n_steps, "Leave every_n_steps out for 100.")
        self._writer = writer
        failures = (tf.errors.OpError, *getattr(writer, "failures", ()))
        self._secondary = NonFatalOutput(f"the output of {type(writer).__name__}", failures)
        self._has_begun = False
        self.writes = False
        self._every_n_steps, self._most_steps = every_n_steps, most_steps
        self._clock = clock
        self.paused = self._paused_at = 0.0  # seconds that do not count, and the start of the current pause

    def begin(self) -> None:
        self.writes = collective.current().rank == 0
        self._known_step = self._updates = self._runs = self._first = 0
        self._pace = 1.0  # global steps for each update
        self._samples: int | None = None
        self._due_at = 0  # the first step is written
        self._waiting: list[_MetricEntry] = []
        self._previous: tuple[float, int, float] | None = None  # steps tried, runs and time of the latest entry
        self._written_at = -math.inf
        self._last: _MetricEntry | None = None  # a step that is not due, but can be the last one

    def pause_timing(self) -> None:
        """Stops the clock, for example for a validation between two steps."""
        self._paused_at = self._clock()

    def resume_timing(self) -> None:
        """Restarts the clock."""
        self.paused += self._clock() - self._paused_at

    def start_at_step(self, step: int, samples_per_step: int | None = None) -> None:
        """Begins the writer at a step; `samples_per_step` is the number of samples in one step."""
        self._write_waiting_entries()
        self._known_step, self._updates, self._samples, self._previous = step, 0, samples_per_step, None
        self._last = None
        self._has_begun = False
        self._secondary.attempt(self._begin_writer, step, is_last_chance=True)

    def _begin_writer(self, step: int) -> None:
        self._writer.begin(step)
        self._has_begun = True

    @property
    def is_due(self) -> bool:
        return self.writes and self._runs >= self._due_at

    @property
    def is_second_run(self) -> bool:
        """Whether the next run is the second run, if `every_n_steps` is None; else False."""
        return self._every_n_steps is None and 0 < self._runs == self._first

    def count(self, steps: int, updates: int) -> None:
        """Counts a run of `steps` steps, of which `updates` updated the variables."""
        if self.is_due:
            self._due_at = self._runs + (self._every_n_steps or self._steps_until_next_entry())
        self._first = self._first or steps
        self._runs += steps
        self._updates += updates

    def _steps_until_next_entry(self) -> int:
        """Returns the steps until the next entry: 1 at first, later a fiftieth of all steps, at most `most_steps`."""
        most = self._most_steps
        grown = 1 if self._runs < _ALL_OF_THE_FIRST else max(2, self._runs // 50)
        return min(grown, most - self._runs % most)

    def set_step(self, step: int) -> None:
        """Sets the current global step, if it is known without a session run."""
        self._updates = step - self._known_step

    def add_entry(self, values: dict[str, float | None], skipped: float, precision: str | None = None) -> bool:
        """Adds an entry; returns whether the waiting entries must be written now."""
        self._last = None
        entry = self._make_entry(values, skipped, precision)
        self._waiting.append(_add_memory_use(entry))
        return entry.time >= self._written_at + _SECS_BETWEEN_WRITES

    def add_to_latest(self, values: dict[str, float | None]) -> None:
        """Adds numbers to the latest entry, which is not written yet."""
        self._waiting[-1] = self._waiting[-1]._replace(values={**self._waiting[-1].values, **values})

    def keep_if_last(self, values: dict[str, float | None], skipped: float = 0, precision: str | None = None) -> None:
        """Keeps the numbers of a step that is not due, in case it is the last step."""
        if self.writes and self._every_n_steps is None:
            self._last = self._make_entry(values, skipped, precision)

    def add_last_entry(self, values: dict[str, float | None] | None = None, skipped: float | None = None) -> None:
        """Adds an entry for the last step: the kept numbers and `values`; a given `skipped` replaces the kept one."""
        last, self._last = self._last, None
        if last is not None:
            known = last.skipped if skipped is None else skipped
            last = last._replace(updates=self._updates, skipped=known, values={**last.values, **(values or {})})
            self._waiting.append(_add_memory_use(last))

    def _make_entry(self, values: dict[str, float | None], skipped: float, precision: str | None) -> _MetricEntry:
        return _MetricEntry(self._updates, self._runs, skipped, self._clock() - self.paused, values, precision)

    def write(self, step: int, keeps_latest: bool = False) -> None:
        """Writes the finite numbers of each waiting entry, with the pace since the previous entry.

        With `keeps_latest`, the latest entry still waits, for numbers that are not known yet.
        """
        moved = step - self._known_step
        if self._updates:  # if the data ends inside a loop, the loop's last steps are in no run that returned
            self._pace = moved / self._updates if moved < self._updates else float(moved // self._updates)
        written = self._waiting[:-1] if keeps_latest else self._waiting
        for entry in written:
            reached = self._known_step + entry.updates * self._pace
            values = {**entry.values, **self._compute_pace(entry, reached + entry.skipped)}
            finite = {
                name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)
            }
            self._secondary.attempt(self._write, round(reached), finite, entry.precision)
            self._written_at = entry.time
        flush = getattr(self._writer, "flush", None)
        if written and flush is not None:
            self._secondary.attempt(flush)
        kept = [entry._replace(updates=entry.updates - self._updates) for entry in self._waiting[len(written) :]]
        self._known_step, self._updates, self._waiting = step, 0, kept

    def _write(self, step: int, values: dict[str, float], precision: str | None) -> None:
        if not self._has_begun:
            self._begin_writer(step)
        self._writer.write(step, values, precision)

    def _compute_pace(self, entry: _MetricEntry, tried: float) -> dict[str, float]:
        before, self._previous = self._previous, (tried, entry.runs, entry.time)
        secs = entry.time - before[2] if before else 0.0
        if before is None or secs <= 0:
            return {}
        found = {"steps_per_sec": (tried - before[0]) / secs}
        if self._samples is not None:
            found["samples_per_sec"] = self._samples * (entry.runs - before[1]) / secs
        return found

    def close(self) -> None:
        if self.writes:
            self._write_waiting_entries()
            self._secondary.attempt(self._writer.close, is_last_chance=True)

    def _write_waiting_entries(self) -> None:
        if self._waiting:
            self.write(self._known_step + round(self._updates * self._pace))


def _add_memory_use(entry: _MetricEntry) -> _MetricEntry:
    memory = current_memory_bytes()
    return entry._replace(values={**entry.values, "memory_mb": None if memory is None else memory / 1e6})


def _global_gradient_norm(gradients):
    """Returns the global norm, computed in float32 for 16-bit gradients, too."""
    return tf.sqrt(
        2.0 * sum_in_order([tf.nn.l2_loss(tf.cast(gradient_values(grad), tf.float32)) for grad in gradients])
    )
