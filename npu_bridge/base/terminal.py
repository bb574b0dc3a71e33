"""Prints on terminals, with control characters in foreign texts escaped (`\\x1b`).

The output of ranks is passed on unchanged, by `npu_run/job/output.py`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from typing import Any, TextIO

# C0 except tab and newline, DEL, C1, characters that change the writing direction, those that some terminals take for a
# newline, and halves of surrogate pairs, which no file and no terminal accepts.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_LINES = re.compile("[\t\n]")


def escape_controls(text: str) -> str:
    """Returns a text with control characters escaped as in Python; tabs and newlines stay unchanged."""
    return _CONTROLS.sub(_escape_match, text)


def escape_in_line(text: str) -> str:
    """Returns a text for use inside a line: all its control characters, tabs and newlines are escaped."""
    return _LINES.sub(_escape_match, escape_controls(text))


def path_for_message(path: str) -> str:
    """Returns a path for a message: relative if it is below the current folder, absolute otherwise."""
    relative = os.path.relpath(path)
    return os.path.abspath(path) if relative.split(os.sep)[0] == os.pardir else relative


def escape_del(text: str) -> str:
    """Escapes DEL in a JSON text for printing; `json.dumps` has escaped all other control characters."""
    return text.replace("\x7f", "\\u007f")


def write_escaped(stream: TextIO | None, text: str, before: str = "", after: str = "") -> None:
    """Writes a text to a stream with control characters escaped. If `stream` is None, discards the text.

    Args:
      before, after: cursor movements, written unchanged, in one write with the text.
    Raises:
      OSError, ValueError: the stream cannot be written, or was closed.
    """
    if stream is None:
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(before + escape_controls(text).encode(encoding, "backslashreplace").decode(encoding) + after)
    if hasattr(stream, "flush"):
        stream.flush()


def is_terminal(stream: Any) -> bool:
    """Returns whether a stream is a terminal; False for a closed one, and for a script's object with `write` alone."""
    try:
        return bool(stream.isatty())
    except (AttributeError, OSError, ValueError):
        return False


def echo(text: str, err: bool = False) -> None:
    """Prints lines on standard output, or with `err` on standard error, where failed writes are ignored.

    Raises:
      OSError: standard output cannot be written, or its reader is gone.
    """
    if not err:
        write_escaped(sys.stdout, f"{text}\n")
        return
    try:
        write_escaped(sys.stderr, f"{text}\n")
    except BrokenPipeError:
        raise
    except (OSError, ValueError):  # a file on a full disk, or closed by a script
        pass


def flush_or_silence() -> None:
    """Flushes or silences standard output and error: a stream that fails when Python ends changes the exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            discard_unwritten_output(stream)


def discard_unwritten_output(stream: TextIO | None) -> None:
    """Discards a stream's unwritten output, which Python would otherwise try to write at its exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def logger(name: str) -> logging.Logger:
    """Returns a module's logger; it escapes control characters, which names of files and hosts can contain."""
    log = logging.getLogger(name)
    log.addFilter(_escape_record)
    return log


def _escape_record(record: logging.LogRecord) -> bool:
    record.msg, record.args = escape_controls(record.getMessage()), ()
    return True


def _escape_match(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode() if match[0] < "\ud800" else f"\\u{ord(match[0]):04x}"
