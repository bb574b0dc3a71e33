"""Where lines go: one line rewritten in place on a terminal, whole lines everywhere else."""

from __future__ import annotations

import shutil
from typing import TextIO

_ERASE_TO_END = "\x1b[K"


class TerminalOutput:
    """Keeps one line at the bottom of a terminal and rewrites it."""

    # Seconds between two rewrites; more often than this nobody can read (ours).
    REFRESH_SECS = 0.1

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._open_line = False

    def show(self, line: str) -> None:
        """Replaces the line, cut to the width of the terminal: a wrapped line cannot be rewritten."""
        width = shutil.get_terminal_size().columns - 1
        self._stream.write(f"\r{line[:width]}{_ERASE_TO_END}")
        self._stream.flush()
        self._open_line = True

    def note(self, text: str) -> None:
        """Prints a line that stays, above the one that is rewritten."""
        self._stream.write(f"\r{text}{_ERASE_TO_END}\n")
        self._stream.flush()
        self._open_line = False

    def close(self) -> None:
        """Leaves the latest line standing and moves below it."""
        if self._open_line:
            self._stream.write("\n")
            self._stream.flush()
            self._open_line = False


class PlainOutput:
    """Prints whole lines: for log files and pipes."""

    REFRESH_SECS: float | None = None

    def __init__(self, stream: TextIO):
        self._stream = stream

    def show(self, line: str) -> None:
        """Prints one line."""
        # One write per line: lines of several processes on one pipe do not mix.
        self._stream.write(line + "\n")
        self._stream.flush()

    note = show

    def close(self) -> None:
        """Nothing is left open."""


class SilentOutput:
    """Says nothing: for every rank but the first."""

    REFRESH_SECS: float | None = None

    def show(self, line: str) -> None:
        """Drops the line."""

    note = show

    def close(self) -> None:
        """Nothing is left open."""


def choose_output(stream: TextIO, speaks: bool = True):
    """The output that fits a stream: a terminal is rewritten, anything else gets whole lines.

    Args:
      stream: a text stream, such as `sys.stdout`.
      speaks: False on ranks that stay silent.
    """
    if not speaks:
        return SilentOutput()
    return TerminalOutput(stream) if stream.isatty() else PlainOutput(stream)
