"""Makes the axes of a chart, which map numbers to positions, and their ticks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

_MOST_TICKS = 6
_EMPTY = (0.0, 1.0)
_LOG_FROM = 20
_LOG_TO = 1e150  # in a larger ratio, one number is practically zero


class Axis(NamedTuple):
    """One axis of a chart.

    Attributes:
      low, high: numbers at the two ends of the axis.
      start, end: positions of `low` and `high`.
      ticks: numbers with a label, ascending.
      warp: the function to which positions are proportional: `math.log2` or `math.log10` for a logarithmic axis,
        `float` for a linear axis.
    """

    low: float
    high: float
    start: float
    end: float
    ticks: list[float]
    warp: Callable[[float], float] = float

    def position_of(self, number: float) -> float:
        """Returns the position of a number; a number beyond an end has the position of this end."""
        low, high = self.warp(self.low), self.warp(self.high)
        share = (self.warp(min(max(number, self.low), self.high)) - low) / (high - low)
        return self.start + share * (self.end - self.start)


def make_linear_axis(numbers: Iterable[float], start: float, end: float, from_zero: bool = False) -> Axis:
    """Makes a linear axis with margins. With `from_zero`, it begins at 0 if no number is negative."""
    low, high = _smallest_and_largest(numbers)
    room = 0.06 * (high - low) or 0.5 * abs(high) or 0.5
    bottom = min(low - room, 0.0) if low < 0 else 0.0 if from_zero or low - room < 0 else low - room
    return Axis(bottom, high + room, start, end, round_tick_values(bottom, high + room))


def make_axis_without_margins(low: float, high: float, start: float, end: float) -> Axis:
    """Makes a linear axis from `low` to `high` without margins; ticks are whole numbers, and the last is `high`."""
    high = max(high, low + 1)
    ticks = [tick for tick in round_tick_values(low, high, 10) if tick == int(tick)]
    distance = ticks[1] - ticks[0] if len(ticks) > 1 else high - low
    ticks = [tick for tick in ticks if high - tick >= 0.6 * distance] + [high]
    return Axis(low, high, start, end, ticks)


def make_logarithmic_axis(numbers: Iterable[float], start: float, end: float) -> Axis:
    """Makes a logarithmic axis for positive numbers, with ticks at 1, 2 and 5 times powers of ten.

    If these are too many, the ticks are at 1 and 3 times powers of ten, or at powers of ten only.
    """
    low, high = _smallest_and_largest(numbers)
    room = max((high / low) ** 0.04, 1.05)
    low, high = low / room, high * room
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 2, 5), (1, 3), (1,)):
        ticks = [digit * 10.0**power for power in powers for digit in digits if low <= digit * 10.0**power <= high]
        if len(ticks) <= _MOST_TICKS + 1:
            break
    return Axis(low, high, start, end, _thin_out_ticks(ticks), math.log10)


def make_loss_axis(numbers: Iterable[float], start: float, end: float) -> Axis:
    """Makes a logarithmic axis if all numbers are positive and their range is wide, else a linear axis."""
    ends = _smallest_and_largest(numbers)
    return (make_logarithmic_axis if needs_logarithm(*ends) else make_linear_axis)(ends, start, end)


def needs_logarithm(low: float, high: float) -> bool:
    """Returns whether a curve from `low` to `high` needs a logarithmic axis."""
    return low > 0 and _LOG_FROM < high / low < _LOG_TO


def make_power_of_two_axis(numbers: Iterable[float], start: float = 0.0, end: float = 1.0) -> Axis:
    """Makes a logarithmic axis between powers of two, with one power of margin, so that a constant is in the middle."""
    low, high = _smallest_and_largest(numbers)
    first, last = math.floor(math.log2(low)) - 1, math.ceil(math.log2(high)) + 1
    return Axis(
        2.0**first, 2.0**last, start, end, _thin_out_ticks([2.0**power for power in range(first, last + 1)]), math.log2
    )


def round_tick_values(low: float, high: float, most_ticks: int = _MOST_TICKS) -> list[float]:
    """Returns about `most_ticks` round numbers from `low` to `high`: multiples of 1, 2 or 5 times a power of ten."""
    span = high - low
    power = 10.0 ** math.floor(math.log10(span / most_ticks))
    step = next(digit * power for digit in (1, 2, 5, 10, 20) if span / (digit * power) <= most_ticks)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{number * step:.10g}") for number in range(first, last + 1)]


def _smallest_and_largest(numbers: Iterable[float]) -> tuple[float, float]:
    known = list(numbers)
    return (min(known), max(known)) if known else _EMPTY


def _thin_out_ticks(ticks: list[float]) -> list[float]:
    return ticks[:: max(1, math.ceil(len(ticks) / _MOST_TICKS))]
