"""Reads scalars from TensorBoard's event files, without TensorFlow.

TensorBoard's readers load TensorFlow, and not every TensorFlow brings TensorBoard. An event file is a row of records:
length (8 bytes), a checksum of it (4), the event, a checksum of the event (4). An event is a protocol buffer. The
fields read are step (2) and summary (5), of a summary's values tag (1), simple_value (2) and tensor (8), and of tensors
those of one number.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

import numpy as np

from npu_bridge.base.reading import open_file

_LONGEST_RECORD = 1 << 31
_LARGEST_STEP = 1 << 53
_LONGEST_SUMMARY = 1 << 24  # longer ones hold pictures or graphs
_TENSOR_DTYPES = {1: np.dtype("<f4"), 2: np.dtype("<f8"), 3: np.dtype("<i4"), 9: np.dtype("<i8")}
_CONTENT, _LISTS = 4, {1: 5, 2: 6}  # fields with the bytes of a tensor's numbers; _LISTS by dtype


def event_files(folder: str) -> list[str]:
    """Finds event files in a folder and one level below, except those of evaluations, in the order of their names."""
    found = []
    for below in ["", *sorted(os.listdir(folder))]:
        place = os.path.join(folder, below)
        if below.startswith(("eval", "validation", "repeat-")) or not os.path.isdir(place):
            continue
        if below and os.path.islink(place):
            continue
        found += [os.path.join(place, name) for name in sorted(os.listdir(place)) if ".tfevents." in name]
    return found


def read_scalars(folder: str) -> dict[str, dict[int, float]]:
    """Reads the number of each step for each tag; a later entry for a step replaces an earlier one.

    A file that ends in the middle of a record, or is damaged, is read up to there.
    """
    tags: dict[str, dict[int, float]] = {}
    for path in event_files(folder):
        for step, tag, number in _scalars(path):
            tags.setdefault(tag, {})[step] = number
    return tags


def _scalars(path: str) -> Iterator[tuple[int, str, float]]:
    with open_file(path, "rb", within=os.path.dirname(path)) as file:
        while len(head := file.read(12)) == 12:
            (length,) = struct.unpack("<Q", head[:8])
            if length > _LONGEST_SUMMARY:
                if length > _LONGEST_RECORD:
                    return  # no event is this long: the file is damaged
                file.seek(length + 4, os.SEEK_CUR)
                continue
            event = file.read(length)
            if len(event) < length or len(file.read(4)) < 4:
                return
            try:
                yield from _of_event(event)
            except (ValueError, IndexError, struct.error):
                return


def _of_event(event: bytes) -> Iterator[tuple[int, str, float]]:
    step, summaries = 0, []
    for number, value in parse_fields(event):
        if number == 2 and isinstance(value, int) and value < _LARGEST_STEP:
            step = value
        elif number == 5 and isinstance(value, bytes):
            summaries.append(value)
    for summary in summaries:
        for number, value in parse_fields(summary):
            if number == 1 and isinstance(value, bytes):
                yield from ((step, tag, scalar) for tag, scalar in _of_value(value))


def _of_value(value: bytes) -> Iterator[tuple[str, float]]:
    tag, scalar = "", None
    for number, field in parse_fields(value):
        if number == 1 and isinstance(field, bytes):
            tag = field.decode("utf-8", "replace")
        elif number == 2 and isinstance(field, bytes) and len(field) == 4:
            (scalar,) = struct.unpack("<f", field)
        elif number == 8 and isinstance(field, bytes):
            scalar = _only_number(field)
    if tag and scalar is not None:
        yield tag, float(scalar)


def _only_number(tensor: bytes) -> float | None:
    """Reads a tensor of one number; returns None for other tensors."""
    fields = dict(parse_fields(tensor))
    dtype = _TENSOR_DTYPES.get(fields.get(1))
    content = fields.get(_CONTENT) or fields.get(_LISTS.get(fields.get(1)), b"")
    if dtype is None or not isinstance(content, bytes) or len(content) != dtype.itemsize:
        return None
    return float(np.frombuffer(content, dtype)[0])


def parse_fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields the fields of a protocol buffer: number, and an integer or, for other types, bytes.

    Raises:
      ValueError, IndexError: the message is no protocol buffer.
    """
    at, end = 0, len(message)
    while at < end:
        key, at = varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = varint(message, at)
        else:
            if kind == 2:
                length, at = varint(message, at)
            elif kind in (1, 5):
                length = 8 if kind == 1 else 4
            else:
                raise ValueError(f"no field is of kind {kind}")
            value, at = message[at : at + length], at + length
            if at > end:
                raise ValueError("a field ends behind its message")
        yield key >> 3, value


def varint(message: bytes, at: int) -> tuple[int, int]:
    """Reads a number of variable length at a place; returns it and the place behind it."""
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("a number of more than 64 bits")
