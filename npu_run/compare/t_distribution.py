"""Computes quantiles of Student's t distribution, for any positive number of degrees of freedom."""

from __future__ import annotations

import math

__all__ = ["t_quantile"]

_TINY = 1e-300


def t_quantile(chance: float, freedom: float) -> float:
    """Computes the number that the magnitude of a t-distributed value exceeds with this chance.

    Args:
      chance: between 0 and 1, exclusive; for both sides together.
      freedom: degrees of freedom, above 0.
    """
    low, high = 0.0, 1.0
    while _beyond(high, freedom) > chance and high < 1e30:
        low, high = high, high * 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _beyond(middle, freedom) > chance else (low, middle)
    return high


def _beyond(t: float, freedom: float) -> float:
    """Computes the chance that the magnitude is above t: a regularized incomplete beta function."""
    x = freedom / (freedom + t * t)
    a, b = freedom / 2, 0.5
    if x >= 1:
        return 1.0
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    front = math.exp(log_front)
    if x < (a + 1) / (a + b + 2):
        return front * _continued_fraction(x, a, b) / a
    return 1 - front * _continued_fraction(1 - x, b, a) / b


def _continued_fraction(x: float, a: float, b: float) -> float:
    """Evaluates the continued fraction of the incomplete beta function from its front (Lentz's method)."""
    c, d = 1.0, 1 / _away_from_zero(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, 400):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / _away_from_zero(1 + numerator * d)
            c = _away_from_zero(1 + numerator / c)
            value *= c * d
        if abs(c * d - 1) < 1e-13:
            break
    return value


def _away_from_zero(number: float) -> float:
    return number if abs(number) > _TINY else _TINY
