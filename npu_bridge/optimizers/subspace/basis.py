"""Computes the directions of a subspace: principal components of the weights in a list of checkpoints."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import tokenize
from collections.abc import Sequence
from typing import Any

import numpy as np

from npu_bridge.base.arguments import check_count
from npu_bridge.base.errors import did_you_mean, message, nearest_word, shown
from npu_bridge.base.files import check_output_path, new_file, write_atomically
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.reading import open_file, read_json
from npu_bridge.base.tf_internals.keras3 import name_of
from npu_bridge.base.tf_internals.savers import keys_in_object_checkpoint

_EXTRA_DIRECTIONS = 10
_COLUMNS = rb'^\{"columns": \['  # the beginning of a basis's description


@dataclasses.dataclass(frozen=True)
class Basis:
    """Orthonormal directions in the space of all trained values.

    Attributes:
      rows: (k, n) float32 array with a direction in each row; memory-mapped if it was loaded.
      columns: name and number of values of each variable, in the order of the columns; empty if the columns are in the
        order in which variables are trained.
    """

    rows: np.ndarray
    columns: tuple[tuple[str, int], ...] = ()

    def save(self, path: str | os.PathLike) -> str:
        """Writes the rows to `path`, a `.npy` file, and the columns to a `.json` file next to it; returns the path.

        Raises:
          OSError: the files cannot be written, or the `.json` file holds something else; then nothing is written.
        """
        path = pathlib.Path(path).with_suffix(".npy")
        described = path.with_suffix(".json")
        check_output_path(described, _COLUMNS, "Basis.save:")
        write_atomically(described, json.dumps({"columns": self.columns}), _COLUMNS)
        with new_file(path, "wb") as file:
            np.save(file, np.asarray(self.rows, np.float32))
        return str(path)

    @classmethod
    def load(cls, path: str | os.PathLike) -> Basis:
        """Loads a basis from the files of `save`, or from any `.npy` file of a matrix; reads only values that are used.

        Raises:
          ValueError: the file does not hold a matrix with at most as many rows as columns, or the `.json` file is
            wrong.
          OSError: the file cannot be read, or is not a regular file.
        """
        rows = _map_array(path)
        if rows.ndim != 2 or rows.shape[0] > rows.shape[1]:
            expected = "a matrix with a row for each direction"
            fix = "Write it with Basis.save."
            raise ValueError(message("Basis", f"{path} holds no basis", expected, f"the shape {rows.shape}", fix))
        described = pathlib.Path(path).with_suffix(".json")
        try:
            columns = read_json(described)["columns"] if described.exists() else ()
            return cls(rows, tuple((name, size) for name, size in columns))
        except (ValueError, TypeError, LookupError) as error:
            problem, expected = f"{described} does not describe the columns", "a list of names and sizes"
            fix = "Write the basis and its description with Basis.save."
            raise ValueError(message("Basis", problem, expected, shown(error), fix)) from None

    def part(self, variables: Sequence[Any], number: int, count: int) -> np.ndarray:
        """Returns one of `count` parts of the rows, with columns in the order of the given variables.

        Args:
          variables: the trained variables.
          number, count: position of the part and number of parts. The numbers of rows differ by at most one; a part can
            be empty.
        Raises:
          ValueError: the basis has other variables, or variables of other sizes.
        """
        sizes = {name_of(variable): variable.shape.num_elements() for variable in variables}
        first, last = row_range_of_part(len(self.rows), number, count)
        rows = self.rows[first:last]
        if not self.columns:
            if sum(sizes.values()) != self.rows.shape[1]:
                problem = "the basis was made for another number of values"
                got = f"{sum(sizes.values())} in {len(sizes)} variables"
                fix = "Compute the basis from checkpoints of this model."
                raise ValueError(message("SubspaceNewton", problem, f"{self.rows.shape[1]} values", got, fix))
            return np.asarray(rows, np.float32)
        known: dict[str, slice] = {}
        position = 0
        for name, size in self.columns:
            known[name] = slice(position, position + size)
            position += size
        for name, size in [*sizes.items(), *((name, size) for name, size in self.columns if name not in sizes)]:
            if name not in known or name not in sizes or known[name].stop - known[name].start != size:
                near = nearest_word(name, set(known) - set(sizes) if name in sizes else set(sizes) - set(known))
                problem = f"the basis and the trained variables differ in {name}"
                expected = ", ".join(f"{name} of {size} values" for name, size in self.columns)
                fix = f"Check whether {near!r} is its new name." if near else "Compute the basis for these variables."
                got = ", ".join(f"{name} of {size}" for name, size in sizes.items())
                raise ValueError(message("SubspaceNewton", problem, expected, got, fix))
        return np.concatenate([np.asarray(rows[:, known[name]], np.float32) for name in sizes], axis=1)


def compute_pca_basis(
    checkpoints: str | os.PathLike | Sequence[str],
    k: int = 32,
    variables: Sequence[Any] | None = None,
    seed: int = 0,
    is_exact: bool = False,
) -> Basis:
    """Computes the k directions along which the weights of some checkpoints differ most.

    Each checkpoint is a point. The mean of the points is subtracted from each row of the matrix of points; the
    directions are the first k right singular vectors of this matrix. The sign of a direction makes its largest entry
    positive.

    Args:
      checkpoints: at least k checkpoints of either format: a list of paths as `tf.train.load_checkpoint` takes them, or
        a folder, of which all checkpoints are used.
      k: number of directions, at least 1 and at most the number of values.
      variables: the trained variables or their names; by default the trainable variables of the TF 1 graph that is
        being built.
      seed: seed of the random directions from which the randomised decomposition (one power iteration) starts.
      is_exact: use an exact decomposition without random directions, which is slower.
    Returns:
      The basis, with named columns.
    Raises:
      TypeError: `k` or `seed` is not an integer.
      ValueError: `k` or `seed` is out of range, there are fewer than k checkpoints or values, or a checkpoint lacks a
        variable or has it in another shape.
    """
    found = _list_checkpoints(checkpoints) if isinstance(checkpoints, (str, os.PathLike)) else list(checkpoints)
    k = check_count("compute_pca_basis", "k", k, "Leave k out for 32.")
    seed = check_count("compute_pca_basis", "seed", seed, "Leave seed out for 0.", at_least=0)
    if len(found) < k:
        got, fix = f"{len(found)} in {shown(checkpoints)}", "Keep more checkpoints, or take a smaller k."
        raise _basis_error(f"there are too few checkpoints for {k} directions", f"at least {k}", got, fix)
    if variables is None:
        variables = [] if tf.executing_eagerly() else tf.compat.v1.trainable_variables()
    names = [variable if isinstance(variable, str) else name_of(variable) for variable in variables]
    if not names:
        fix = "Pass variables=model.trainable_variables, or their names."
        raise _basis_error("the trained variables are unknown", "their names", "none", fix)
    points = [_read_values(path, names) for path in found]
    sizes = [array.size for array in points[0]]
    for path, point in zip(found, points):
        for name, array, first in zip(names, point, points[0]):
            if array.shape != first.shape:
                got, fix = f"{array.shape} in {path}", "Take checkpoints of one model."
                raise _basis_error(f"the checkpoints have different shapes of {name}", f"{first.shape}", got, fix)
    matrix = np.stack([np.concatenate([array.ravel().astype(np.float32) for array in point]) for point in points])
    if k > matrix.shape[1]:
        raise _basis_error(
            "there are more directions than values", f"at most {matrix.shape[1]}", str(k), "Take a smaller k."
        )
    return Basis(principal_directions(matrix, k, seed, is_exact), tuple(zip(names, sizes)))


def principal_directions(matrix: np.ndarray, k: int, seed: int = 0, is_exact: bool = False) -> np.ndarray:
    """Returns the first k right singular vectors of a matrix with centred columns, as rows with fixed signs."""
    centred = matrix - matrix.mean(axis=0, keepdims=True)
    if is_exact:
        directions = np.linalg.svd(centred, full_matrices=False)[2]
        within = directions.T if len(directions) >= k else np.linalg.qr(_add_random_columns(directions.T, k, seed))[0]
        directions = within.T[:k]
    else:
        # The matrix has few rows and very many columns, so rows are combined at random.
        width = min(k + _EXTRA_DIRECTIONS, matrix.shape[1])
        mixed = np.random.default_rng(seed).standard_normal((width, len(matrix))).astype(matrix.dtype) @ centred
        reached = np.linalg.qr(mixed.T)[0]
        reached = np.linalg.qr(centred.T @ np.linalg.qr(centred @ reached)[0])[0]
        if reached.shape[1] < width:
            reached = np.linalg.qr(_add_random_columns(reached, width, seed))[0]
        directions = (reached @ np.linalg.svd(centred @ reached, full_matrices=True)[2].T).T[:k]
    largest = directions[np.arange(k), np.abs(directions).argmax(axis=1)]
    return (directions * np.where(largest < 0, -1.0, 1.0)[:, np.newaxis]).astype(np.float32)


def row_range_of_part(total_rows: int, part_number: int, part_count: int) -> tuple[int, int]:
    """Returns first and last + 1 of the rows in a part; the first of the `part_count` parts can have one row more."""
    size, larger = divmod(total_rows, part_count)
    first = part_number * size + min(part_number, larger)
    return first, first + size + (part_number < larger)


def _add_random_columns(columns, width, seed):
    missing = width - columns.shape[1]
    return np.concatenate([columns, np.random.default_rng(seed).standard_normal((len(columns), missing))], axis=1)


def _map_array(path):
    """Maps the array of a `.npy` file into memory, so that only values that are used are read."""
    try:
        with open_file(path, "rb") as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, is_fortran, dtype = read(file)
            if dtype.kind not in "biuf":
                raise ValueError(f"its entries are {dtype}")
            return np.memmap(file, dtype, "r", file.tell(), shape, "F" if is_fortran else "C")
    except (ValueError, EOFError, SyntaxError, tokenize.TokenError, OverflowError, TypeError) as error:
        expected, fix = "a .npy file of numbers", "Write it with Basis.save."
        raise ValueError(message("Basis", f"{path} holds no basis", expected, shown(error), fix)) from None


def _list_checkpoints(folder):
    """Returns the checkpoints of a folder, in the order of the numbers in their names."""
    found = [path.with_suffix("") for path in pathlib.Path(folder).glob("*.index")]

    def split_at_numbers(path):
        return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.name)]

    return [str(path) for path in sorted(found, key=split_at_numbers)]


def _read_values(path, names):
    reader = tf.train.load_checkpoint(path)
    known = {name: name for name in reader.get_variable_to_shape_map()}
    known.update(keys_in_object_checkpoint(reader))
    for name in names:
        if name not in known:
            fix = did_you_mean(name, known, "Pass names of variables in the checkpoint.")
            raise _basis_error(f"{path} lacks a variable", f"one of its {len(known)} names", repr(name), fix)
    return [reader.get_tensor(known[name]) for name in names]


def _basis_error(problem, expected, got, fix):
    return ValueError(message("compute_pca_basis", problem, expected, got, fix))
