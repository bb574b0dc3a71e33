"""A terminal for rank 0 whose text the launcher sees too."""

from __future__ import annotations

import fcntl
import pty
import termios
import tty
from typing import TextIO

__all__ = ["open_terminal_like"]


def open_terminal_like(stream: TextIO) -> tuple[int, int]:
    """Opens a pseudo-terminal of the size of a stream's terminal.

    Text passes through it unchanged: turning newlines into what a screen needs is left to the real terminal.

    Returns:
      The launcher's descriptor, to read from, and the rank's, to be its standard output or error.
    """
    ours, theirs = pty.openpty()
    tty.setraw(theirs)
    size = fcntl.ioctl(stream.fileno(), termios.TIOCGWINSZ, b"\0" * 8)
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, size)
    return ours, theirs
