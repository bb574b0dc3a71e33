"""Products of rows and matrices that scripts took from `numpy.core.umath_tests`, a module for numpy's own tests."""

from __future__ import annotations

from typing import Any

import numpy
from numpy import matmul as matrix_multiply

__all__ = ["inner1d", "matrix_multiply"]


def inner1d(a: Any, b: Any) -> Any:
    """Returns the inner products of the rows of two arrays."""
    return numpy.einsum("...i,...i->...", a, b)
