"""Compares two arrays in files piece by piece, so that they need not fit into memory."""

from __future__ import annotations

import math
import os
import tokenize
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from npu_bridge.base.reading import RefusedFileError, open_file
from npu_bridge.reporting.history import to_json_value
from npu_run.compare.checkpoint_files import SavedTensor
from npu_run.compare.verdict import NotComparableError

# The largest relative error between two ways of computing the same: some thousand roundings for float32, as in
# sums of many numbers; some ten for 16 bits, whose products are summed in more bits.
TOLERANCES = {
    "float64": 1e-9,
    "complex128": 1e-9,
    "float32": 1e-4,
    "complex64": 1e-4,
    "float16": 5e-3,
    "bfloat16": 4e-2,
}
# This share of elements may be beyond the tolerance, unless one of them is this many tolerances away.
_SHARE = 1e-3
_FAR = 100.0
_NOTHING = 1e-30  # treated as zero: smaller numbers have few bits, or none
_PIECE = 1 << 20  # elements: 8 MB as float64


class StoredArray(NamedTuple):
    """An array in a file.

    Attributes:
      path: path of the file.
      offset: bytes before the first element of the array.
      dtype: `F|C`: the dtype F of the numbers in the file, and the dtype C in which they were computed.
      shape: the dimensions of the array.
      is_fortran: whether the first dimension varies fastest (Fortran order).
      folder: the folder in which the file must be; None if the user gave the path.
    """

    path: str
    offset: int
    dtype: str
    shape: tuple[int, ...]
    is_fortran: bool = False
    folder: str | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def computed_dtype(self) -> str:
        """The dtype in which the numbers were computed."""
        return self.dtype.rpartition("|")[2]


class ArrayAgreement(NamedTuple):
    """How closely two arrays agree; errors are B minus A.

    Attributes:
      elements: number of elements.
      cosine: cosine of the angle between the arrays; 1 if both are zero.
      gain: the factor by which A must be multiplied to be closest to B.
      largest_error, mean_error: largest and mean magnitude of errors.
      largest_relative: largest relative error. An error is divided by the element of A or by the root mean square of A,
        whichever is larger.
      mismatches: share of elements whose relative error is above the tolerance.
      not_finite: three counts of elements: not finite in A, not finite in B, and not finite with a difference between A
        and B.
      distance: norm of the difference, divided by the norm of A.
      tolerance: the allowed relative error.
      is_inside: whether the arrays agree within the tolerance.
    """

    elements: int
    cosine: float
    gain: float
    largest_error: float
    mean_error: float
    largest_relative: float
    mismatches: float
    not_finite: tuple[int, int, int]
    distance: float
    tolerance: float
    is_inside: bool

    def as_json_facts(self) -> dict[str, Any]:
        """Returns the fields for JSON, with a replacement for NaN and infinities."""
        return {name: to_json_value(value) for name, value in self._asdict().items()}


def open_npy(path: str, dtype: str | None = None, folder: str | None = None) -> StoredArray:
    """Reads the header of a `.npy` file and returns where the array is.

    Args:
      path: path of the file.
      dtype: the dtype in which the numbers were computed; None means the dtype of the file.
      folder: the folder in which the file must be; None if the user gave the path.
    Raises:
      NotComparableError: the file cannot be read, is not a `.npy` file, or is shorter than its header says.
    """
    try:
        with open_file(path, "rb", folder) as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, is_fortran, kind = read(file)
            offset, there = file.tell(), os.fstat(file.fileno()).st_size
    except RefusedFileError:
        raise  # a folder that names such a file is not trusted with others
    except (OSError, ValueError, EOFError, SyntaxError, tokenize.TokenError, OverflowError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise NotComparableError(f"{path} is not an array of numpy: {reason}.") from None
    if any(dimension < 0 for dimension in shape):
        raise NotComparableError(f"{path} is not a valid numpy file: its header has the shape {shape}.")
    if kind.hasobject or kind.kind not in "biufc":
        raise NotComparableError(f"{path} holds {kind} instead of numbers.")
    needed = offset + math.prod(shape) * kind.itemsize
    if there < needed:
        raise NotComparableError(f"{path} is truncated: by its header it needs {needed} bytes, but it has {there}.")
    return StoredArray(path, offset, f"{kind.str.lstrip('|')}|{dtype or kind.name}", shape, is_fortran, folder)


def read_pieces(array: StoredArray | SavedTensor) -> Iterator[np.ndarray]:
    """Yields the elements as flat pieces of at most a million elements; the last dimension varies fastest."""
    if array.size == 0:
        return
    if isinstance(array, SavedTensor):
        whole = array.read()
        yield from (whole[first : first + _PIECE] for first in range(0, array.size, _PIECE))
        return
    name = array.dtype.partition("|")[0]
    if array.is_fortran and len(array.shape) > 1:
        with open_file(array.path, "rb", array.folder) as file:
            mapped = np.memmap(file, name, "r", array.offset, array.shape, "F")
        for first in range(0, array.size, _PIECE):
            places = np.arange(first, min(first + _PIECE, array.size))
            yield mapped[np.unravel_index(places, array.shape)]
        return
    kind = np.dtype(name)
    with open_file(array.path, "rb", array.folder) as file:
        file.seek(array.offset)
        for first in range(0, array.size, _PIECE):
            piece = np.fromfile(file, kind, min(_PIECE, array.size - first))
            if len(piece) < min(_PIECE, array.size - first):
                raise NotComparableError(f"{array.path} ended while it was read.")
            yield piece


def choose_tolerance(array: StoredArray) -> float:
    """Returns the allowed relative error for the dtype of an array; 0 for whole numbers."""
    return TOLERANCES.get(array.computed_dtype, 0.0)


def compare_arrays(a: StoredArray, b: StoredArray, tolerance: float | None = None) -> ArrayAgreement:
    """Compares two arrays with the same number of elements.

    Args:
      a: the reference; its dtype sets the tolerance.
      b: the other array.
      tolerance: relative tolerance; None means the tolerance of the dtype in `TOLERANCES`, and 0 for whole numbers.
    """
    tolerance = choose_tolerance(a) if tolerance is None else tolerance
    sums = np.zeros(4)  # a a, b b, a b, |b - a|
    square_error = largest = 0.0
    bad, counted = np.zeros(3, np.int64), 0
    for x, y, both in _read_finite_pairs(a, b, bad):
        error = np.abs(y - x)
        # Squares of magnitudes beyond 1e154 overflow to infinity, which serves as well here.
        with np.errstate(over="ignore"):
            sums += (np.vdot(x, x).real, np.vdot(y, y).real, np.vdot(x, y).real, error.sum())
            square_error += float(np.dot(error, error))
        largest = max(largest, float(error.max(initial=0.0)))
        counted += both
    rms = math.sqrt(sums[0] / counted) if counted else 0.0
    rms = rms or (math.sqrt(sums[1] / counted) if counted else 0.0)
    relative, mismatches = 0.0, 0
    if largest > 0:  # only then read the files a second time
        for x, y, _ in _read_finite_pairs(a, b, np.zeros(3, np.int64)):
            errors = np.abs(y - x) / np.maximum(np.abs(x), max(rms, _NOTHING))
            relative = max(relative, float(errors.max(initial=0.0)))
            mismatches += int(np.count_nonzero(errors > tolerance))
    mismatches += int(bad[2])
    share = mismatches / a.size if a.size else 0.0
    is_far = relative > _FAR * tolerance
    norms = math.sqrt(sums[0]) * math.sqrt(sums[1])
    cosine = sums[2] / norms if norms else float(largest == 0)
    gain = sums[2] / sums[0] if sums[0] else 1.0
    distance = math.sqrt(square_error / sums[0]) if sums[0] else (math.inf if square_error else 0.0)
    mean = float(sums[3]) / counted if counted else 0.0
    return ArrayAgreement(
        *(a.size, float(min(cosine, 1.0)), float(gain), largest, mean, relative, share),
        *(tuple(int(number) for number in bad), distance, tolerance, share <= _SHARE and not is_far and not bad[2]),
    )


def _read_finite_pairs(
    a: StoredArray, b: StoredArray, is_not_finite: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Yields (piece of a, piece of b, length), as float64, with only the elements that are finite in both arrays.

    Counts all other elements in `is_not_finite`.
    """
    for x, y in zip(read_pieces(a), read_pieces(b)):
        x, y = (piece.astype(np.complex128 if piece.dtype.kind == "c" else np.float64) for piece in (x, y))
        with np.errstate(over="ignore", invalid="ignore"):
            if np.isfinite(np.vdot(x, x) + np.vdot(y, y)):  # cheaper than looking at each
                yield x, y, len(x)
                continue
        finite_x, finite_y = np.isfinite(x), np.isfinite(y)
        both = finite_x & finite_y
        if not both.all():
            alike = (x == y) | (np.isnan(x) & np.isnan(y))
            is_not_finite += (np.sum(~finite_x), np.sum(~finite_y), np.sum(~both & ~alike))
            x, y = x[both], y[both]
        yield x, y, len(x)
