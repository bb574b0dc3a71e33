"""Records the old names and behaviours that a script uses: prints each once, and keeps it for the migration report."""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import types
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from npu_bridge.base.terminal import echo, path_for_message

__all__ = [
    "OldNameUse",
    "SourcePlace",
    "place_of_caller",
    "list_old_name_uses",
    "nothing_recorded",
    "record_use",
    "say_once",
    "stop_printing",
]

# Modules below `contrib` count as callers.
_FOLDER = os.path.dirname(os.path.abspath(__file__))
_MODULES = ("proxies.py", "imports.py", "journal.py", "missing.py", os.path.join("old_python", ""))
_NOT_OF_USER = (*(os.path.join(_FOLDER, name) for name in _MODULES), "<frozen")
_ENTRIES: dict[tuple[str, str], OldNameUse] = {}
# A byte for each printed line, by its checksum, in memory that forked children share. Memory that is never written
# costs nothing, and of a thousand subjects two seldom share a byte.
_PRINTED = mmap.mmap(-1, 1 << 24)
_PRINTS = True


class SourcePlace(NamedTuple):
    """A place in the user's files: file and line."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{path_for_message(self.file)}:{self.line}"


class OldNameUse(NamedTuple):
    """A record of an old name or behaviour that a script used.

    Attributes:
      kind: "name", "friction", "missing" or "ignored".
      what: the name or behaviour.
      remark: the replacement, or another explanation.
      place: the first use.
    """

    kind: str
    what: str
    remark: str
    place: SourcePlace


def place_of_caller(frame: types.FrameType | None = None) -> SourcePlace:
    """Returns the place of the nearest caller outside this package and Python's import system."""
    frame = frame or sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_OF_USER):
        frame = frame.f_back
    return SourcePlace(frame.f_code.co_filename, frame.f_lineno)


def record_use(kind: str, subject: str, remark: str = "") -> None:
    """Records the first use of a name; later uses have no effect."""
    if (kind, subject) not in _ENTRIES:
        _ENTRIES[kind, subject] = OldNameUse(kind, subject, remark, place_of_caller(sys._getframe(1)))


def say_once(subject: str, remark: str) -> None:
    """Records a replaced name or behaviour; at its first use prints a line to standard error, on rank 0 only."""
    record_use("friction", subject, remark)
    place = zlib.crc32(subject.encode()) % len(_PRINTED)
    if _PRINTS and not _PRINTED[place]:
        _PRINTED[place] = 1
        echo(f"npu-run: {place_of_caller(sys._getframe(1))}: {subject}: {remark}", err=True)


def list_old_name_uses() -> list[OldNameUse]:
    """Returns all recorded entries, in the order of first use."""
    return list(_ENTRIES.values())


@contextlib.contextmanager
def nothing_recorded() -> Iterator[None]:
    """Records and prints nothing in a block."""
    global _PRINTS
    entries, prints, _PRINTS = dict(_ENTRIES), _PRINTS, False
    try:
        yield
    finally:
        _ENTRIES.clear()
        _ENTRIES.update(entries)
        _PRINTS = prints


def stop_printing() -> None:
    """Stops printing, in ranks above 0 and in child processes, whose parent has printed the lines."""
    global _PRINTS
    _PRINTS = False
