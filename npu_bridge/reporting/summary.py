"""Computes and formats the figures of a finished run, such as steps, time and last loss."""

from __future__ import annotations

import array
import math
import pathlib
import statistics
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from npu_bridge.reporting.history import History, list_rows_and_starts
from npu_bridge.reporting.progress_line import (
    format_count,
    format_loss,
    format_rate,
    format_scale,
    format_secs,
    format_steps,
    wrap_parts,
)
from npu_bridge.reporting.stragglers import describe_slow_rank, list_slow_periods

# The last loss is a mean over this many steps: a single batch shows little.
LAST_LOSS_STEPS = 10

# The first two steps of a session carry its start-up: TF prepares the graph for each new set of fetches.
_START_UP_STEPS = 2
_START_UP_RUNS = 3  # a `TensorBoardHook` has different fetches in each of the first three runs
_TIMES_KEPT = 20_000  # after that, every second time is dropped
_COLUMNS = 79


class Summary(NamedTuple):
    """A run in seven numbers; None for unknown numbers.

    Attributes:
      ranks: number of ranks in the latest session.
      steps: the last global step.
      first_loss: loss of the first recorded step of the run, across sessions.
      last_loss: mean loss of the last ten recorded steps that were not skipped.
      skipped_steps: number of skipped steps in the whole run.
      loss_scale: the loss scale of the latest step; None without loss scaling.
      steps_per_sec: steps tried per second in the latest session that has steps, without start-up.
    """

    ranks: int
    steps: int
    first_loss: float | None
    last_loss: float | None
    skipped_steps: int
    loss_scale: float | None
    steps_per_sec: float | None


def summarize(history: History) -> Summary:
    """Returns the summary of a history with any number of sessions."""
    rows = history.rows
    losses = [row.loss for row in rows if row.loss is not None]
    last = _last_losses(history)
    return Summary(
        ranks=history.starts[-1].ranks if history.starts else 1,
        steps=rows[-1].step if rows else 0,
        first_loss=losses[0] if losses else None,
        last_loss=_mean(last) if last else None,
        skipped_steps=history.skipped_steps,
        loss_scale=rows[-1].loss_scale if rows else None,
        steps_per_sec=_steps_per_sec(history),
    )


def format_summary(summary: Summary) -> str:
    """Formats the summary as one sentence."""
    parts = [f"trained {format_steps(summary.steps)} on {format_count(summary.ranks, 'rank')}"]
    if summary.first_loss is not None and summary.last_loss is not None:
        parts.append(f"loss {format_loss(summary.first_loss)} -> {format_loss(summary.last_loss)}")
    parts.append(f"skipped {format_steps(summary.skipped_steps)}")
    if summary.loss_scale is not None:
        parts.append(f"loss scale {format_scale(summary.loss_scale)}")
    if summary.steps_per_sec:
        parts.append(f"{format_rate(summary.steps_per_sec)} steps/s")
    return ", ".join(parts)


class StepTimes:
    """The durations of steps without the start-up, and their median and maximum.

    For a long training, the times of some ten thousand steps are kept.
    """

    def __init__(self):
        self._secs = array.array("d")
        self._total = 0.0
        self.runs = self._counted = 0
        self._every = 1
        self.worst: float | None = None

    def add(self, secs: float, steps: int = 1) -> None:
        """Adds a session run of `steps` steps."""
        self.runs += 1
        if self.runs <= _START_UP_RUNS:
            return
        each = max(secs, 0.0) / steps
        self._total += each
        self._counted += 1
        self.worst = each if self.worst is None else max(self.worst, each)
        if self._counted % self._every == 0:
            self._secs.append(each)
            if len(self._secs) >= _TIMES_KEPT:
                self._secs, self._every = self._secs[1::2], 2 * self._every

    @property
    def median(self) -> float | None:
        """Median seconds per step; None before the fourth run."""
        return statistics.median(self._secs) if self._secs else None

    @property
    def steps_per_sec(self) -> float | None:
        """Steps per second, from the mean duration of all steps."""
        return self._counted / self._total if self._total else None


def format_ending(
    history: History,
    steps: tuple[int, int],
    duration_secs: float,
    times: StepTimes,
    steps_per_run: int = 1,
    report: str | None = None,
) -> list[str]:
    """Formats the last lines of a training, for a terminal with 80 columns.

    Args:
      history: history of the training.
      steps: global steps at which this session began and ended.
      duration_secs: duration of the session in seconds.
      times: times of the session's runs.
      steps_per_run: number of steps in a run.
      report: path of the page.
    """
    summary, facts = summarize(history), history.facts
    start, end = steps
    place = f" on {summary.ranks} ranks" if summary.ranks > 1 else ""
    place += f" up to step {end}" if start else ""
    about = [f"trained {format_steps(end - start)}{place} in {format_secs(duration_secs)}"]
    if summary.first_loss is not None and summary.last_loss is not None:
        counted = len(_last_losses(history))
        of = f" (mean of the last {counted} steps)" if counted > 1 else ""
        about.append(f"loss {format_loss(summary.first_loss)} -> {format_loss(summary.last_loss)}{of}")
    if summary.skipped_steps or summary.loss_scale is not None:
        about.append(f"skipped {format_steps(summary.skipped_steps)}")
    pace = []
    if times.median is not None and times.worst is not None:
        pace.append(f"median step {format_secs(times.median)}, worst {format_secs(times.worst)}")
    if facts.samples_per_step:
        pace.append(f"{facts.samples_per_step * times.runs * steps_per_run:,} samples")
        if times.steps_per_sec:
            pace.append(f"{format_rate(facts.samples_per_step * times.steps_per_sec)} samples/s")
    elif summary.steps_per_sec:
        pace.append(f"{format_rate(summary.steps_per_sec)} steps/s")
    memory = [f"{peak / 1e9:.2f} GB on rank {rank}" for rank, peak in (facts.memory_bytes or {}).items()]
    memory += [
        f"{peak / 1e9:.2f} GB on the GPU of rank {rank}" for rank, peak in (facts.gpu_memory_bytes or {}).items()
    ]
    lines = [wrap_parts(about, _COLUMNS)]
    lines += [wrap_parts(pace, _COLUMNS)] if pace else []
    lines += [wrap_parts([f"peak memory {memory[0]}", *memory[1:]], _COLUMNS, ", ")] if memory else []
    for found, rank, recovered in list_slow_periods(history):
        if recovered is None or recovered > start:
            since = f"from step {found.step} {'on' if recovered is None else f'to {recovered}'}"
            lines += textwrap.wrap(f"{since}, {describe_slow_rank(found, rank)}", _COLUMNS, subsequent_indent="  ")
    return lines + ([f"report {pathlib.Path(report).absolute().as_uri()}"] if report else [])


def _last_losses(history: History) -> list[float]:
    """Returns the losses whose mean is `last_loss`."""
    known = [row for row in history.rows if row.loss is not None]
    applied = [row for row in known if not row.skipped]
    return [row.loss for row in (applied or known)[-LAST_LOSS_STEPS:] if row.loss is not None]


def _mean(numbers: Sequence[float]) -> float:
    try:
        return math.fsum(numbers) / len(numbers)
    except OverflowError:  # numbers near the largest float
        return sum(number / len(numbers) for number in numbers)


def _steps_per_sec(history: History) -> float | None:
    rows, tried, starts = list_rows_and_starts(history)
    end = len(rows)
    for begin in (*reversed(starts), 0):
        if end - begin >= 2:
            first, last = begin + min(_START_UP_STEPS, end - begin - 1) - 1, end - 1
            elapsed = rows[last].time - rows[first].time
            if elapsed > 0:
                return round((tried[last] - tried[first]) / elapsed, 3)
        end = begin
    return None
