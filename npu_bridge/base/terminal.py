"""Prints on terminals: control characters in texts from outside are shown (`\\x1b`), and not sent.

The output of ranks goes another way (`npu_run/job/output.py`), unchanged.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from typing import TextIO

# C0 except tab and newline, DEL, C1, characters that change the writing direction, those that some terminals take for a
# newline, and halves of surrogate pairs, which no file and no terminal accepts.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_LINES = re.compile("[\t\n]")


def visible(text: str) -> str:
    """Returns a text with its control characters escaped as in Python; tabs and newlines stay."""
    return _CONTROLS.sub(_escaped, text)


def in_line(text: str) -> str:
    """Returns a name for use inside a line: also escapes tabs and newlines, so that it cannot start a new line."""
    return _LINES.sub(_escaped, visible(text))


def path_here(path: str) -> str:
    """Returns a path for a message: relative if it is below the current folder, absolute otherwise."""
    relative = os.path.relpath(path)
    return os.path.abspath(path) if relative.split(os.sep)[0] == os.pardir else relative


def json_text(text: str) -> str:
    """Returns JSON text for printing: `json.dumps` escapes everything but DEL."""
    return text.replace("\x7f", "\\u007f")


def put(stream: TextIO | None, text: str, before: str = "", after: str = "") -> None:
    """Writes a text to a stream in visible form; None, which Python uses for a closed stream, discards it.

    Args:
      before, after: our own cursor movements; written unchanged, in one write with the text.
    Raises:
      OSError, ValueError: the stream cannot be written, or was closed.
    """
    if stream is None:
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(before + visible(text).encode(encoding, "backslashreplace").decode(encoding) + after)
    stream.flush()


def echo(text: str, err: bool = False) -> None:
    """Prints lines on standard output, or on standard error; failures of the latter are ignored.

    Raises:
      OSError: standard output cannot be written, or its reader is gone.
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
    """Flushes the streams or silences them: a stream that fails at Python's end would change the exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            silence(stream)


def silence(stream: TextIO | None) -> None:
    """Discards a stream's unwritten output: Python would try again at its end, and report the failure."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def logger(name: str) -> logging.Logger:
    """Returns a module's logger, which escapes control characters: log lines can name files, hosts and operators."""
    log = logging.getLogger(name)
    log.addFilter(_make_visible)
    return log


def _make_visible(record: logging.LogRecord) -> bool:
    record.msg, record.args = visible(record.getMessage()), ()
    return True


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode() if found[0] < "\ud800" else f"\\u{ord(found[0]):04x}"
