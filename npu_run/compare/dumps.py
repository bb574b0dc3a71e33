"""Reads folders of dumped tensors: dumps of `DumpConfig`, and `.npy` files with names of the NPU toolchain.

Names of the NPU toolchain have two forms: `op_name.output_index.timestamp.npy`, and, in a converted dump of a device,
`op_type.op_name.task.stream.timestamp.output.index.npy`. If a name is too long for a file, a CSV file in the folder
maps the file's actual name to the long name.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
from typing import Any, NamedTuple

from npu_bridge.base.files import new_file
from npu_bridge.base.reading import RefusedFileError, open_file, read_json, to_integer
from npu_bridge.base.terminal import escape_in_line
from npu_run.compare.arrays import StoredArray, open_npy
from npu_run.compare.names import convert_to_file_name
from npu_run.compare.verdict import NotComparableError, NothingToCompareError

_INDEX, _OPERATORS = "index.json", "operators.json"
_BY_TIME = re.compile(r"(?P<op>.+)\.(?P<slot>\d+)\.(?P<time>\d{4,})\.npy")
_CONVERTED = re.compile(
    r"(?P<type>[^.]+)\.(?P<op>.+?)(\.\d+)*\.(?P<time>\d{8,})\.(?P<side>input|output)\.(?P<slot>\d+)(\.[^.]+)*\.npy"
)
_OF_OURS = re.compile(r"(?P<type>[^.]+)\.(?P<op>[^.]+)\.(?P<side>input|output)\.(?P<slot>\d+)(\.\d+)?\.npy")
_NUMBER = re.compile(r"\d{1,15}", re.ASCII)
_DEEPEST = 7
_LONGEST_NAME = 200


class DumpKey(NamedTuple):
    """The step, rank and graph of a dump, which identify it in a folder."""

    step: int
    rank: int
    graph: str


class TensorPlace(NamedTuple):
    """An input or output of an operator: the operator's name, "input" or "output", and the number of the tensor."""

    op: str
    side: str
    slot: int


class Dump(NamedTuple):
    """The tensors of one step.

    Attributes:
      path: path of its folder.
      key: step, rank and graph.
      files: for each `TensorPlace`, in the order of execution, a tensor's file and its dtype before the dump (or None).
      types: types of operators by name, where known.
      inputs: for each operator, where known, the names of the operators that compute its inputs.
      notes: sentences about omitted files.
    """

    path: str
    key: DumpKey
    files: dict[TensorPlace, tuple[str, str | None]]
    types: dict[str, str]
    inputs: dict[str, list[str]]
    notes: tuple[str, ...] = ()

    def array(self, place: TensorPlace) -> StoredArray:
        """Returns the array of an input or output; raises `NotComparableError` if its file cannot be read."""
        file, dtype = self.files[place]
        return open_npy(os.path.join(self.path, file), dtype, self.path)

    @property
    def operators(self) -> list[str]:
        """Names of the operators in the order of execution, each once."""
        return list(dict.fromkeys(place.op for place in self.files))


def read_dumps(folder: str) -> list[Dump]:
    """Reads the dumps in a folder and its subfolders, in the order of writing; keeps only the latest dump of each key.

    Raises:
      NotComparableError: there is no dump, or an index cannot be read.
    """
    if not os.path.isdir(folder):
        raise NotComparableError(f"There is no folder {folder!r}; name one with dumped tensors.")
    dumps: dict[DumpKey, Dump] = {}
    statistics = ""
    for path, files in _folders_with_files(folder):
        if _INDEX in files:
            dump = _read_indexed_dump(path)
        else:
            statistics = path if "statistics.csv" in files else statistics
            dump = _read_named_files(path, files)
        if dump is not None and dump.files:
            dumps.pop(dump.key, None)
            dumps[dump.key] = dump
    if not dumps and statistics:
        raise NotComparableError(
            f'{statistics} holds statistics of tensors; dump the tensors themselves: dump_data="tensor".'
        )
    if not dumps:
        raise NothingToCompareError(
            f"{folder} holds no dumped tensors; expected {_INDEX} as DumpConfig(enable_dump=True) writes it, or .npy "
            f"files named op_name.output_index.timestamp.npy."
        )
    return list(dumps.values())


def read_csv_pairs(path: str, folder: str | None = None) -> dict[str, str]:
    """Reads a CSV file as a dict from the first to the second column.

    Args:
      path: the file.
      folder: the folder in which the file must be; None if the user gave the path.

    Raises:
      NotComparableError: the file cannot be read, or no line has two columns.
    """
    try:
        with open_file(path, within_folder=folder, encoding="utf-8-sig", newline="") as file:
            rows = [[cell.strip() for cell in row] for row in csv.reader(file)]
    except RefusedFileError:
        raise
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise NotComparableError(f"{path} cannot be read as a CSV file: {error}.") from None
    pairs = {row[0]: row[1] for row in rows if len(row) > 1 and row[0] and row[1]}
    if not pairs:
        raise NotComparableError(
            f"{path} has no line with two names; expected two names in each line, separated by a comma."
        )
    return pairs


def write_named_outputs(dump: Dump, folder: str) -> int:
    """Writes the outputs of a dump as `op_name.output_index.timestamp.npy`; returns their number.

    Timestamps ascend in the order of execution. A name that is too long for a file is replaced by a number;
    `mapping.csv` maps the number to the name.

    Raises:
      NotComparableError: one of these files already exists in the folder.
      OSError: a dumped file is outside the dump's folder or cannot be read, or a new file cannot be written.
    """
    os.makedirs(folder, exist_ok=True)
    began = int(os.stat(dump.path).st_mtime) * 1_000_000
    long: list[tuple[str, str]] = []
    outputs = [(place, file) for place, (file, _) in dump.files.items() if place.side == "output"]
    for count, (place, file) in enumerate(outputs, 1):
        name = f"{escape_in_line(convert_to_file_name(place.op))}.{place.slot}.{began + count}.npy"
        if len(name.encode()) > _LONGEST_NAME:
            long.append((f"{began + count}.npy", name))
            name = long[-1][0]
        target = os.path.join(folder, name)
        if os.path.lexists(target):
            raise NotComparableError(f"{target} exists already; name a new folder.")
        with open_file(file, "rb", dump.path) as given, new_file(target, "wb") as copy:
            shutil.copyfileobj(given, copy)
    if long:
        with new_file(os.path.join(folder, "mapping.csv")) as out:
            csv.writer(out).writerows(long)
    return len(outputs)


def _folders_with_files(folder: str) -> list[tuple[str, set[str]]]:
    """Returns each folder that has files, and the names of these files; paths are sorted, numbers in them by value."""
    found = []
    for path, below, files in os.walk(folder):
        depth = 0 if path == folder else len(os.path.relpath(path, folder).split(os.sep))
        below[:] = [] if depth >= _DEEPEST else below
        if files:
            found.append((path, set(files)))
    return sorted(found, key=lambda item: [(len(part), part) for part in item[0].split(os.sep)])


def _read_indexed_dump(path: str) -> Dump:
    index = _read_json(path, _INDEX)
    try:
        rows = [
            (TensorPlace(str(row["op"]), str(row["side"]), to_integer(row["slot"])), row) for row in index["tensors"]
        ]
        files = {place: (str(row["file"]), str(row["dtype"])) for place, row in rows}
        types = {place.op: str(row["type"]) for place, row in rows}
        key = DumpKey(to_integer(index.get("step", 0)), _rank_of(path), str(index.get("graph", "")))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise NotComparableError(f"{os.path.join(path, _INDEX)} is not an index of a dump: {error!r}.") from None
    return Dump(path, key, files, types, _read_inputs(path, rows, types))


def _read_inputs(path: str, rows, types: dict[str, str]) -> dict[str, list[str]]:
    """Returns a dict from operator to the operators that compute its inputs; adds operator types to `types`.

    Reads the dump's list of operators; without a list, uses the dumped inputs, which show no types.
    """
    listed = os.path.join(os.path.dirname(path), _OPERATORS)
    if os.path.lexists(listed):
        inputs = {}
        try:
            for name, kind, tensors in _read_json(os.path.dirname(path), _OPERATORS):
                inputs[str(name)] = list(dict.fromkeys(tensor.rpartition(":")[0] for tensor in tensors))
                types.setdefault(str(name), str(kind))
        except (TypeError, ValueError, AttributeError) as error:
            raise NotComparableError(f"{listed} is not a list of operators: {error!r}.") from None
        return inputs
    inputs = {}
    for place, row in rows:
        if place.side == "input":
            inputs.setdefault(place.op, []).append(str(row.get("tensor", "")).rpartition(":")[0])
    return inputs


def _read_named_files(path: str, names: set[str]) -> Dump | None:
    """Makes a dump from files whose names have a known form; returns None if there are no such files."""
    given: dict[str, str] = {}
    for name in sorted(names):
        if name.endswith(".csv") and name != "statistics.csv":
            given.update(_names_by_file(read_csv_pairs(os.path.join(path, name), path), names))
    found: list[tuple[int, TensorPlace, str]] = []
    types: dict[str, str] = {}
    strange = 0
    for name in sorted(names):
        full = given.get(name, name)
        if not full.endswith(".npy"):
            continue
        parsed = _CONVERTED.fullmatch(full) or _OF_OURS.fullmatch(full) or _BY_TIME.fullmatch(full)
        if parsed is None:
            strange += 1
            continue
        parts = parsed.groupdict()
        place = TensorPlace(parts["op"], parts.get("side") or "output", int(parts["slot"]))
        found.append((int(parts.get("time") or 0), place, name))
        if parts.get("type"):
            types[place.op] = parts["type"]
    files: dict[TensorPlace, tuple[str, str | None]] = {}
    repeated = 0
    for _, place, name in sorted(found):
        if place in files:
            repeated += 1
        else:
            files[place] = (name, None)
    notes = []
    if strange:
        notes.append(f"{path}: {strange} .npy files have names of another form and were left out.")
    if repeated:
        notes.append(f"{path}: {repeated} files repeat an output at a later time; the first of each counts.")
    step = os.path.basename(path)
    key = DumpKey(int(step) if _NUMBER.fullmatch(step) else 0, 0, "")
    return Dump(path, key, files, types, {}, tuple(notes)) if files or notes else None


def _names_by_file(pairs: dict[str, str], names: set[str]) -> dict[str, str]:
    """Returns a dict from file to full name; each pair has both, in any order, the file with or without ending."""
    found = {}
    for one, other in pairs.items():
        for file, full in ((one, other), (other, one)):
            file = file if file in names else f"{file}.npy"
            if file in names:
                found[file] = full if full.endswith(".npy") else f"{full}.npy"
                break
    return found


def _rank_of(path: str) -> int:
    """Reads the rank from a path `<time>/<rank>/<graph name>/<graph number>/<step>`."""
    parts = os.path.abspath(path).split(os.sep)
    return int(parts[-4]) if len(parts) > 4 and _NUMBER.fullmatch(parts[-4]) and len(parts[-4]) < 8 else 0


def _read_json(folder: str, name: str) -> Any:
    try:
        return read_json(name, within_folder=folder)
    except RefusedFileError:
        raise
    except (OSError, ValueError) as error:
        raise NotComparableError(f"{os.path.join(folder, name)} cannot be read: {error}.") from None
