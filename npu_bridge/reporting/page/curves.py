"""Reduces a history to some hundred points with a lowest, highest and mean value each, and smooths them."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from npu_bridge.reporting.history import Evaluation, History, StepRow, list_rows_and_starts

# A screen shows no more; their edges and means stay far below a megabyte.
MOST_BUCKETS = 800
# Times are recorded in milliseconds, so the pace of a few short steps would be noise.
_RATE_BUCKETS, _RATE_STEPS, _RATE_SECS = 100, 5, 0.02
# Larger numbers count as infinite: their sums and squares can be.
_LARGEST = 1e150
_SMALLEST = 1e-150  # smallest loss scale, as scales are drawn by powers of two


class ValueRange(NamedTuple):
    """The range and mean of a number in a bucket, over the steps in which the number was finite."""

    low: float
    high: float
    mean: float


class StepBucket(NamedTuple):
    """Consecutive steps of a history.

    Attributes:
      first, last: number of steps tried, including skipped steps, up to the first and the last step of the bucket. This
        is the horizontal axis.
      step: global step after the last step of the bucket.
      loss, loss_scale, learning_rate: range and mean; None if the number is unknown or never finite.
      skipped: the number of skipped steps.
      not_finite: the number of steps whose loss was NaN, infinite or too large to draw.
      precision: dtype of the last step; None if unknown.
      recorded: the number of steps that the history has in the bucket.
    """

    first: int
    last: int
    step: int
    loss: ValueRange | None
    loss_scale: ValueRange | None
    learning_rate: ValueRange | None
    skipped: int
    not_finite: int
    precision: str | None
    recorded: int


class Speed(NamedTuple):
    """The steps tried per second between two positions of the horizontal axis."""

    first: int
    last: int
    steps_per_sec: float


class Curves(NamedTuple):
    """The curves of a history.

    Attributes:
      buckets: groups of consecutive steps, in order; empty for a history without steps.
      speeds: speeds in the order of steps, without the starts of sessions.
      restarts: positions at which the sessions after the first began.
      steps_per_bucket: rows of the history in each bucket except the last; 1 if no rows were joined.
      evaluations: evaluations with their positions on the horizontal axis.
    """

    buckets: list[StepBucket]
    speeds: list[Speed]
    restarts: list[int]
    steps_per_bucket: int
    evaluations: list[tuple[int, Evaluation]]


def make_curves(history: History) -> Curves:
    """Divides the steps of a history into buckets with the same number of recorded steps.

    Args:
      history: the history of a run, which can have several sessions.
    """
    rows, places, starts = list_rows_and_starts(history)
    edges = sorted({0, *starts, len(rows)})
    size = max(1, math.ceil(len(rows) / MOST_BUCKETS))
    buckets = [_make_bucket(rows[at : at + size], places[at : at + size]) for at in range(0, len(rows), size)]
    restarts = [places[at - 1] for at in edges[1:-1]]
    steps = [row.step for row in rows]
    at = [min(bisect.bisect_left(steps, each.step), len(rows) - 1) for each in history.evaluations] if rows else []
    evaluations = [(places[row], each) for row, each in zip(at, history.evaluations)]
    return Curves(buckets, _compute_speeds(rows, places, edges), restarts, size, evaluations)


def smooth(values: Sequence[float], half_width: int) -> np.ndarray:
    """Returns a centred weighted mean; weights fall with the distance, to zero beyond `half_width`.

    The mean does not lag behind a falling curve. At both ends, the window is cut off. Values that are not finite are
    ignored; for a window without finite values, the result is NaN.

    Args:
      values: the raw curve.
      half_width: the number of neighbours on each side; 0 leaves the curve unchanged.
    """
    raw = np.asarray(values, float)
    finite = np.isfinite(raw)
    weights = (half_width + 1.0 - np.abs(np.arange(-half_width, half_width + 1))) / (half_width + 1.0)

    def sum_over_window(signal):
        return np.convolve(signal, weights)[half_width : half_width + len(raw)]

    total, share = sum_over_window(np.where(finite, raw, 0.0)), sum_over_window(finite.astype(float))
    return np.divide(total, share, out=np.full(len(raw), np.nan), where=share > 1e-9)


def smooth_trend(values: Sequence[float]) -> np.ndarray:
    """Smooths a curve for pictures and pages, over a fortieth of its length on each side."""
    return smooth(values, half_width=len(values) // 40)


def _make_bucket(rows: Sequence[StepRow], steps_tried: Sequence[int]) -> StepBucket:
    return StepBucket(
        steps_tried[0],
        steps_tried[-1],
        rows[-1].step,
        _make_range(row.loss for row in rows),
        _make_range(row.loss_scale for row in rows if row.loss_scale is not None and row.loss_scale > _SMALLEST),
        _make_range(row.learning_rate for row in rows),
        sum(row.skipped for row in rows),
        sum(row.loss is not None and not can_be_drawn(row.loss) for row in rows),
        rows[-1].precision,
        len(rows),
    )


def _make_range(values) -> ValueRange | None:
    known = [value for value in values if value is not None and can_be_drawn(value)]
    return ValueRange(min(known), max(known), math.fsum(known) / len(known)) if known else None


def can_be_drawn(value: float) -> bool:
    """Returns whether a number is finite, and small enough for sums of squares of such numbers to be finite."""
    return abs(value) < _LARGEST


def _compute_speeds(rows, steps_tried, session_starts) -> list[Speed]:
    """Computes the speed in parts of each session, without the session's first step, which includes the start-up.

    A part has several steps, as one of them can include saving a checkpoint. The last part takes the remaining steps.
    """
    found = []
    for begin, end in zip(session_starts, session_starts[1:]):
        count, last = end - begin - 1, end - 1
        if count > 4 * _RATE_STEPS:  # the second step is slow, too
            begin, count = begin + 1, count - 1
        size = max(1, math.ceil(count / _RATE_BUCKETS), min(_RATE_STEPS, count // 4))
        firsts = [begin]
        for at in range(begin + 1, end - size):
            if at - firsts[-1] >= size and rows[at].time - rows[firsts[-1]].time >= _RATE_SECS:
                firsts.append(at)
        if len(firsts) > 1 and rows[last].time - rows[firsts[-1]].time < _RATE_SECS:
            firsts.pop()
        for first, after in zip(firsts, [*firsts[1:], last]):
            secs = rows[after].time - rows[first].time
            if secs > 0 and steps_tried[after] > steps_tried[first]:
                found.append(
                    Speed(steps_tried[first], steps_tried[after], (steps_tried[after] - steps_tried[first]) / secs)
                )
    return found
