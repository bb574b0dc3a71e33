"""Writes the files of a dump; defines folders, names and contents of the files."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import stat
import time
from collections.abc import Iterable
from typing import Any, Callable, NamedTuple

import numpy as np

from npu_bridge.base.files import new_file

_LONGEST_NAME = 200  # file systems allow 255 bytes; the ending and a number are added
_NAME_CHARACTERS = str.maketrans(dict.fromkeys("./\\ ", "_"))
OPERATORS_FILE = "operators.json"
STATISTICS = ("min", "max", "mean", "nan", "inf")


class DumpedTensor(NamedTuple):
    """One input or output of an operator.

    Attributes:
      op: name of the operator.
      op_type: type of the operator.
      side: "input" or "output".
      slot: position among the inputs or outputs, from 0.
      tensor: name of the tensor.
      value: numpy array.
    """

    op: str
    op_type: str
    side: str
    slot: int
    tensor: str
    value: np.ndarray

    @property
    def metadata(self) -> dict[str, Any]:
        """All attributes except the value, with dtype and shape of the value."""
        return {
            "op": self.op,
            "type": self.op_type,
            "side": self.side,
            "slot": self.slot,
            "tensor": self.tensor,
            "dtype": str(self.value.dtype),
            "shape": list(self.value.shape),
        }


class DumpFolder:
    """The folders into which one hook writes: `<dump_path>/<time>/<rank>/<graph name>/<graph id>/<step>`.

    Args:
      dump_path: the root folder, which must exist.
      rank: rank of this process.
      clock: returns seconds since the epoch; called once.
    """

    def __init__(self, dump_path: str, rank: int, clock: Callable[[], float] = time.time):
        started = time.strftime("%Y%m%d%H%M%S", time.localtime(clock()))
        self._root = os.path.join(dump_path, started, str(rank))
        self._graphs: dict[Any, str] = {}

    def make_step_folder(self, graph_name: str, graph: Any, step: int) -> str:
        """Creates the folder of one step and returns its path.

        Args:
          graph_name: readable name of the graph.
          graph: a hashable key of the graph; each key gets its own number.
        """
        if graph not in self._graphs:
            self._graphs[graph] = self._make_graph_folder(to_file_name(graph_name))
        folder = os.path.join(self._graphs[graph], str(step))
        _make_folder(folder)
        return folder

    def _make_graph_folder(self, name: str) -> str:
        parent = os.path.join(self._root, name)
        of_time = os.path.dirname(self._root)
        os.makedirs(os.path.dirname(of_time), exist_ok=True)
        for folder in (of_time, self._root, parent):
            _make_folder(folder)
        number = 0
        while True:
            folder = os.path.join(parent, str(number))
            try:
                os.mkdir(folder)  # another session of the same second can have these folders
                return folder
            except FileExistsError:
                number += 1


def _make_folder(folder: str) -> None:
    """Creates a folder unless it exists; does not follow links.

    Raises:
      FileExistsError: a link or a file has that name.
    """
    try:
        os.mkdir(folder)
    except FileExistsError:
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            problem = f"dump_path: {folder} is a link or a file, and dumps do not follow links"
            raise FileExistsError(
                f"{problem}. Expected a folder, or an unused path. Remove the link or file."
            ) from None


def to_file_name(text: str) -> str:
    """Converts a text to a file name: `. / \\ :` and blanks become `_`.

    A long name is cut and ends with a digest of the text.
    """
    name = text.translate(_NAME_CHARACTERS)
    if len(name) > _LONGEST_NAME:
        digest = hashlib.sha1(text.encode()).hexdigest()[:12]
        name = f"{name[: _LONGEST_NAME - 13]}_{digest}"
    return name


def write_tensors(folder: str, tensors: Iterable[DumpedTensor], **facts: Any) -> None:
    """Writes every tensor as `<type>.<operator>.<side>.<slot>.npy`, and an `index.json` with their list and `facts`.

    Tensors of dtypes that numpy does not know, such as bfloat16, are written as float32 without loss.
    """
    index = []
    taken = set()
    for tensor in tensors:
        name = f"{tensor.op_type}.{to_file_name(tensor.op)}.{tensor.side}.{tensor.slot}"
        unique, number = name, 2
        while unique in taken:  # `a/b` and `a_b` are different operators
            unique, number = f"{name}.{number}", number + 1
        taken.add(unique)
        with new_file(os.path.join(folder, f"{unique}.npy"), "wb") as file:
            np.save(file, convert_to_savable_dtype(tensor.value), allow_pickle=False)
        index.append({"file": f"{unique}.npy", **tensor.metadata})
    with new_file(os.path.join(folder, "index.json")) as file:
        json.dump({**facts, "tensors": index}, file, indent=1)


def write_operators(folder: str, operators: Iterable[tuple[str, str, list[str]]]) -> None:
    """Writes `operators.json` beside the step folders of a graph, once: name, type and inputs of every operator.

    Each operator comes after those that compute its inputs. Inputs are names of tensors.
    """
    path = os.path.join(os.path.dirname(folder), OPERATORS_FILE)
    if not os.path.lexists(path):
        with new_file(path) as file:
            json.dump([[name, kind, inputs] for name, kind, inputs in operators], file, separators=(",", ":"))


def write_statistics(folder: str, tensors: Iterable[DumpedTensor]) -> None:
    """Writes `statistics.csv`: minimum, maximum and mean of finite elements, and counts of NaN and Inf, by tensor."""
    with new_file(os.path.join(folder, "statistics.csv")) as file:
        lines = csv.writer(file)
        lines.writerow(["op", "type", "side", "slot", "tensor", "dtype", "shape", *STATISTICS])
        for tensor in tensors:
            metadata = tensor.metadata
            metadata["shape"] = "x".join(map(str, tensor.value.shape))
            lines.writerow([*metadata.values(), *compute_statistics(tensor.value).values()])


def compute_statistics(value: np.ndarray) -> dict[str, Any]:
    """Computes the `STATISTICS` of an array; complex numbers count by their magnitude.

    Minimum, maximum and mean are "" if no element is finite.
    """
    numbers = np.asarray(convert_to_savable_dtype(value))
    if numbers.dtype.kind == "c":
        numbers = np.abs(numbers)
    if numbers.dtype.kind in "bf":
        numbers = numbers.astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    found = {"min": "", "max": "", "mean": ""}
    if finite.size:
        found = {"min": finite.min(), "max": finite.max(), "mean": finite.mean(dtype=np.float64)}
    return {**found, "nan": int(np.isnan(numbers).sum()), "inf": int(np.isinf(numbers).sum())}


def convert_to_savable_dtype(value: np.ndarray) -> np.ndarray:
    """Converts an array to a dtype that `np.save` can write and `np.load` can read."""
    value = np.asarray(value)
    return value.astype(np.float32) if value.dtype.kind == "V" else value
