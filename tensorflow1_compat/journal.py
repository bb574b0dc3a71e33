"""Notes the old names and behaviours that a script uses: prints each once, and keeps it for the migration report."""

from __future__ import annotations

import mmap
import os
import sys
import types
import zlib
from typing import NamedTuple

from npu_bridge.base.terminal import echo, path_here

__all__ = ["Entry", "Place", "asked_from", "entries", "note", "say_once", "silence"]

# Modules below `contrib` count as callers.
_FOLDER = os.path.dirname(os.path.abspath(__file__))
_MODULES = ("proxies.py", "imports.py", "journal.py", "missing.py", os.path.join("old_python", ""))
_NOT_ASKING = (*(os.path.join(_FOLDER, name) for name in _MODULES), "<frozen")
_ENTRIES: dict[tuple[str, str], Entry] = {}
# A byte for each printed line, by its checksum, in memory that forked children share.
_SAID = mmap.mmap(-1, mmap.PAGESIZE)
_SPEAKS = True


class Place(NamedTuple):
    """The place in the user's files that uses a name."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{path_here(self.file)}:{self.line}"


class Entry(NamedTuple):
    """One thing that a script used.

    Attributes:
      kind: "name", "friction", "missing" or "ignored".
      what: the name.
      remark: its replacement, or another explanation.
      place: its first use.
    """

    kind: str
    what: str
    remark: str
    place: Place


def asked_from(frame: types.FrameType | None = None) -> Place:
    """Returns the nearest caller outside this package and Python's import system."""
    frame = frame or sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_ASKING):
        frame = frame.f_back
    return Place(frame.f_code.co_filename, frame.f_lineno)


def note(kind: str, what: str, remark: str = "") -> None:
    """Notes the first use of a name."""
    if (kind, what) not in _ENTRIES:
        _ENTRIES[kind, what] = Entry(kind, what, remark, asked_from(sys._getframe(1)))


def say_once(what: str, remark: str) -> None:
    """Notes a replaced name or behaviour, and prints a line about its first use on rank 0's standard error."""
    note("friction", what, remark)
    place = zlib.crc32(what.encode()) % len(_SAID)
    if _SPEAKS and not _SAID[place]:
        _SAID[place] = 1
        echo(f"npu-run: {asked_from(sys._getframe(1))}: {what}: {remark}", err=True)


def entries() -> list[Entry]:
    """Returns all notes, in the order of first use."""
    return list(_ENTRIES.values())


def silence() -> None:
    """Prints nothing from now on: for ranks above 0, and for child processes, whose parent has printed the lines."""
    global _SPEAKS
    _SPEAKS = False
