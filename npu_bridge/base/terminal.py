"""The one way to a terminal: control characters of texts from outside are shown there (`\\x1b`), and not sent.

What ranks print goes another way (`launch/job/output.py`), untouched.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from typing import TextIO

__all__ = ["echo", "flush_or_silence", "in_line", "json_text", "logger", "put", "silence", "visible"]

# C0 but for tab and newline, DEL, C1, what turns the direction of writing, what some terminals take for a newline, and
# halves of pairs, which no file and no terminal can be given.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_LINES = re.compile("[\t\n]")


def visible(text: str) -> str:
    """A text with its control characters as Python writes them; tabs and newlines stay."""
    return _CONTROLS.sub(_escaped, text)


def in_line(text: str) -> str:
    """A name inside a line: its tabs and newlines are shown, too, so that it cannot begin a line of its own."""
    return _LINES.sub(_escaped, visible(text))


def json_text(text: str) -> str:
    """JSON as it is printed: `json.dumps` escapes all but DEL."""
    return text.replace("\x7f", "\\u007f")


def put(stream: TextIO | None, text: str, before: str = "", after: str = "") -> None:
    """Writes a text to a stream as it can be shown there; None, as Python has it for a closed one, takes nothing.

    Args:
      before, after: what moves the cursor, of ours; written as it is, in one piece with the text.
    Raises:
      OSError, ValueError: the stream cannot be written, or was closed.
    """
    if stream is None:
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(before + visible(text).encode(encoding, "backslashreplace").decode(encoding) + after)
    stream.flush()


def echo(text: str, err: bool = False) -> None:
    """Prints lines on standard output, or on standard error; the latter where it can be.

    Raises:
      OSError: standard output cannot be written, or nobody reads any more.
    """
    if not err:
        put(sys.stdout, f"{text}\n")
        return
    try:
        put(sys.stderr, f"{text}\n")
    except BrokenPipeError:
        raise
    except (OSError, ValueError):  # a file on a full disk, or closed by a script
        pass


def flush_or_silence() -> None:
    """Has nothing left to be written when Python ends, which would turn a stream that fails into an exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            silence(stream)


def silence(stream: TextIO | None) -> None:
    """Has what is still to be written to a stream go nowhere: Python would try again at its end, and say so."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def logger(name: str) -> logging.Logger:
    """The logger of a module; what is logged may name files, hosts and operators, and is shown on a terminal."""
    log = logging.getLogger(name)
    log.addFilter(_make_visible)
    return log


def _make_visible(record: logging.LogRecord) -> bool:
    record.msg, record.args = visible(record.getMessage()), ()
    return True


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode() if found[0] < "\ud800" else f"\\u{ord(found[0]):04x}"
