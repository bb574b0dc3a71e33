"""Computes statistics of deviations along a training: sizes, independent numbers, medians, quantiles."""

from __future__ import annotations

import math

import numpy as np

# Fewer steps do not show which of them are correlated.
FEWEST_PLACES = 8
# Standard deviation of the median of many normal numbers, relative to their mean's.
_MEDIAN_FACTOR = math.sqrt(math.pi / 2)


def count_independent_deviations(rows: np.ndarray, window_length: int = 1) -> tuple[float, int]:
    """Divides the steps into pieces; returns the number of independent numbers in a piece and the number of pieces.

    Args:
      rows: deviations, a row for each repeat.
      window_length: the number of steps over which each deviation was computed.
    """
    count = rows.shape[1]
    pieces = max(1, min(4, count // max(10, 3 * window_length)))
    parts = np.array_split(rows, pieces, axis=1)
    # The mean over pieces: with rounding alone, deviations are noise in the beginning and one direction later.
    return pieces / sum(_estimate_correlation_length(part) / part.shape[1] for part in parts), pieces


def _estimate_correlation_length(rows: np.ndarray) -> float:
    """Estimates over how many neighbouring steps a deviation lasts.

    Steps deviate together if their deviations have the same signs, or the same proportions between repeats: if one
    rounding error grows, the deviations of each step are a multiple of the same few numbers. Two repeats always have
    the same proportions.
    """
    repeats, count = rows.shape
    if count < FEWEST_PLACES or repeats < 3:
        return float(count)
    norms = np.sqrt((rows**2).sum(axis=0))
    units = rows / np.where(norms > 0, norms, 1.0)
    pairs = np.einsum("it,jt->ijt", units, units)
    by_chance = 1 / (repeats - 1)
    same_sign = _autocorrelation(rows)
    proportions = (_autocorrelation(pairs.reshape(-1, count)) - by_chance) / (1 - by_chance)
    return max(_sum_autocorrelation(same_sign), _sum_autocorrelation(proportions))


def _autocorrelation(rows: np.ndarray) -> np.ndarray:
    """Computes the autocorrelation: the mean product of two values at each distance, scaled to 1 for distance 0."""
    count = rows.shape[1]
    power = np.abs(np.fft.rfft(rows, 2 * count, axis=1)) ** 2
    sums = np.fft.irfft(power, axis=1)[:, :count].sum(axis=0) / np.arange(count, 0, -1)
    return (sums / max(sums[0], 1e-300))[: count // 2]


def _sum_autocorrelation(correlations: np.ndarray) -> float:
    """Returns the number of correlated steps: 1 plus twice the correlations up to the first one below 0.05.

    If no correlation is below 0.05, returns twice the number of correlations.
    """
    none = np.flatnonzero(correlations < 0.05)
    if not len(none):
        return 2.0 * len(correlations)
    return max(1.0, 1 + 2 * float(correlations[1 : none[0]].sum()))


def single_step_noise(values: np.ndarray) -> float:
    """Estimates the noise of single losses: a robust standard deviation of second differences."""
    if len(values) < 3:
        return 0.0
    bend = values[2:] - 2 * values[1:-1] + values[:-2]
    return float(1.4826 * np.median(np.abs(bend)) / math.sqrt(6))


def running_mean(values: np.ndarray, half_window: int) -> np.ndarray:
    """Computes running means over `half_window` places on each side; over fewer places at the ends."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    low, high = np.maximum(at - half_window, 0), np.minimum(at + half_window + 1, len(values))
    return np.maximum(sums[high] - sums[low], 0.0) / (high - low)


def running_medians(rows: np.ndarray, length: int) -> np.ndarray:
    """Computes, for each row, the medians of all windows of a length."""
    length = min(length, rows.shape[1])
    return np.array([_medians_of_row(row, length) for row in rows])


def _medians_of_row(row: np.ndarray, length: int) -> np.ndarray:
    """Computes the medians of all windows of a row, without a copy of each window.

    Bit by bit from the highest, finds the place that the middle values of all windows have in the sorted row.
    """
    order = np.argsort(row, kind="stable")
    places = np.empty_like(order)
    places[order] = np.arange(len(row))
    low = np.tile(np.arange(len(row) - length + 1), (2, 1))  # for the lower and the upper middle value
    high, found = low + length, np.zeros_like(low)
    rank = np.zeros_like(low) + [[(length - 1) // 2], [length // 2]]
    for bit in reversed(range(len(row).bit_length())):
        is_one = (places >> bit) & 1 == 1
        zeros = np.concatenate([[0], np.cumsum(~is_one)])
        goes_up = rank >= zeros[high] - zeros[low]
        found |= goes_up.astype(found.dtype) << bit
        rank -= np.where(goes_up, zeros[high] - zeros[low], 0)
        low, high = (np.where(goes_up, zeros[-1] + at - zeros[at], zeros[at]) for at in (low, high))
        places = np.concatenate([places[~is_one], places[is_one]])  # so that a window stays in one piece
    lower, upper = row[order][found]
    unknown = np.concatenate([[0], np.cumsum(np.isnan(row))])
    return np.where(unknown[length:] > unknown[:-length], np.nan, (lower + upper) / 2)


def rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values**2)))


def median_spread(length: int) -> float:
    """Returns the standard deviation of the median of `length` independent normal numbers."""
    return 1.0 if length == 1 else _MEDIAN_FACTOR / math.sqrt(length)


def t_quantile(probability: float, degrees_of_freedom: float) -> float:
    """Computes the number that the magnitude of a t-distributed value exceeds with a given probability.

    Args:
      probability: between 0 and 1, exclusive; for both tails together.
      degrees_of_freedom: degrees of freedom, at least 1; need not be a whole number.
    """
    degrees_of_freedom = min(
        degrees_of_freedom, 1000.0
    )  # for more degrees of freedom the numbers are up to 1 % smaller
    # The chance beyond sqrt(freedom) / tan(angle) is the integral of sin(angle) ** (freedom - 1) up to this angle.
    angles = np.geomspace(1e-15, math.pi / 2, 20_000)
    heights = np.sin(angles) ** (degrees_of_freedom - 1)
    chances = np.cumsum(np.diff(angles) * (heights[1:] + heights[:-1]))
    with np.errstate(divide="ignore"):  # small angles have no chance in 64 bits
        logarithms = np.log(chances / chances[-1])
    return math.sqrt(degrees_of_freedom) / math.tan(
        math.exp(np.interp(math.log(probability), logarithms, np.log(angles[1:])))
    )
