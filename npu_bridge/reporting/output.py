"""Prints progress: rewrites one line on a terminal and in a notebook, prints separate lines elsewhere."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from typing import TextIO

from npu_bridge.base.terminal import escape_in_line, is_terminal, write_escaped


class TerminalOutput:
    """An output that rewrites one line at the bottom of a terminal."""

    # Seconds between two rewrites; readers cannot follow faster rewrites.
    REFRESH_SECS = 0.1
    _erase, _least_characters = "\x1b[K", 0  # how the rest of an earlier line goes: erased, or covered by blanks

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._open_line = False

    @property
    def width(self) -> int:
        """Number of characters that fit in a line now; a longer line would wrap and could not be rewritten."""
        columns = 0
        with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor
            columns = os.get_terminal_size(self._stream.fileno()).columns
        return (columns or shutil.get_terminal_size().columns) - 1

    def show(self, line: str) -> None:
        """Overwrites the current line with `line`, cut off at `width`."""
        shown = escape_in_line(line)[: self.width].ljust(self._least_characters)
        _write_to_stream(self._stream, shown, "\r", self._erase)
        self._open_line = True

    def note(self, text: str) -> None:
        """Prints a permanent line above the line that is rewritten."""
        _write_to_stream(self._stream, text.ljust(self._least_characters), "\r", f"{self._erase}\n")
        self._open_line = False

    def close(self) -> None:
        """Leaves the last line in place and moves the cursor below it."""
        if self._open_line:
            _write_to_stream(self._stream, "\n")
            self._open_line = False


class NotebookOutput(TerminalOutput):
    """An output that rewrites a line in a notebook cell; spaces cover the previous line, as there is no erase code."""

    REFRESH_SECS = 0.3  # each rewrite is a message to the browser
    width = 110
    _erase, _least_characters = "", width


class PlainOutput:
    """An output in whole lines, for log files and pipes. Without a stream, it prints nothing."""

    REFRESH_SECS: float | None = None
    width: int | None = None  # no limit

    def __init__(self, stream: TextIO | None = None):
        self._stream = stream

    def show(self, line: str) -> None:
        """Prints one line."""
        # One write per line: lines of several processes on one pipe do not mix.
        _write_to_stream(self._stream, line + "\n")

    note = show

    def close(self) -> None:
        """Does nothing."""


def choose_output(stream: TextIO | None, is_printing: bool = True):
    """Returns the output for a stream: rewrites a line on a terminal and in a notebook, else prints whole lines.

    A line that cannot be written, to a full disk or a closed pipe, is lost; the training continues.

    Args:
      stream: a text stream, such as `sys.stdout`. None, Python's value for a closed stream, prints nothing.
      is_printing: whether this rank prints at all.
    """
    if not is_printing or stream is None:
        return PlainOutput()
    if type(stream).__module__.partition(".")[0] == "ipykernel":
        return NotebookOutput(sys.stdout)  # a notebook paints standard error red
    return TerminalOutput(stream) if is_terminal(stream) else PlainOutput(stream)


def _write_to_stream(stream: TextIO | None, text: str, before: str = "", after: str = "") -> None:
    if stream is None:
        return
    with contextlib.suppress(OSError, ValueError):  # ValueError: the stream is closed
        write_escaped(stream, text, before, after)
