"""Reads scalars from TensorBoard's event files; TensorFlow parses the events."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from typing import Any, Callable

from google.protobuf.message import DecodeError

from npu_bridge.base.reading import open_file

_LONGEST_RECORD = 1 << 31


def event_files(folder: str) -> list[str]:
    """Finds event files in a folder and its direct subfolders, in the order of their names; leaves out evaluations."""
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
    """Returns, for each tag, the scalar of each step; a later entry for a step replaces an earlier entry.

    A file that is damaged, or ends in the middle of a record, is read up to that place.
    """
    tags: dict[str, dict[int, float]] = {}
    for path in event_files(folder):
        for step, tag, number in _read_file(path):
            tags.setdefault(tag, {})[step] = number
    return tags


def _read_file(path: str) -> Iterator[tuple[int, str, float]]:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow logs when it is loaded
    import tensorflow as tf

    # A record is its length, a checksum of that, an event, and a checksum. TensorFlow's reader would start its devices.
    with open_file(path, "rb", within_folder=os.path.dirname(path)) as file:
        while len(head := file.read(12)) == 12:
            (length,) = struct.unpack("<Q", head[:8])
            record = file.read(length + 4) if length < _LONGEST_RECORD else b""
            if len(record) < length + 4:
                return
            try:
                event = tf.compat.v1.Event.FromString(record[:-4])
            except DecodeError:
                return
            yield from ((event.step, value.tag, number) for value, number in _scalar_values(event, tf.make_ndarray))


def _scalar_values(event: Any, make_ndarray: Callable) -> Iterator[tuple[Any, float]]:
    """Yields the values of an event that hold a single number, each with this number."""
    for value in event.summary.value:
        if value.WhichOneof("value") == "simple_value":
            yield value, value.simple_value
        elif value.HasField("tensor") and all(dim.size == 1 for dim in value.tensor.tensor_shape.dim):
            with contextlib.suppress(TypeError, ValueError):
                yield value, float(make_ndarray(value.tensor).item())
