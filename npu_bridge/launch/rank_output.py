"""What ranks print, brought together: rank 0 as it is, every other rank line by line behind `[rank n] `."""

from __future__ import annotations

import collections
from typing import BinaryIO, Callable

__all__ = ["JointStream", "RankOutput"]

# Python's unbuffered `print` writes the newline by itself: long enough for it to arrive, too short to notice.
_PARTIAL_LINE_SECS = 0.05
_TAIL_LINES = 40


class JointStream:
    """One of the launcher's own streams, shared by all ranks."""

    def __init__(self, stream: BinaryIO):
        self._stream = stream
        self._is_mid_line = False

    def write(self, text: bytes) -> None:
        """Writes text of rank 0 at once; it may be a part of a line, or a progress bar that ends in `\\r`."""
        self._stream.write(text)
        self._stream.flush()
        self._is_mid_line = not text.endswith(b"\n")

    def write_line(self, line: bytes) -> None:
        """Writes a line (its newline is added) of another rank; an unfinished line above it stays whole."""
        self.write((b"\n" if self._is_mid_line else b"") + line + b"\n")


class RankOutput:
    """One stream of one rank, on its way to the joint stream.

    Args:
      rank: the rank that prints.
      joint: where it goes.
      tail: the rank's last lines, kept for the report of its death; its two streams share one.
      log: is given everything as it comes.
    """

    def __init__(
        self,
        rank: int,
        joint: JointStream,
        tail: collections.deque[str] | None = None,
        log: Callable[[bytes], None] | None = None,
    ):
        self.tail = collections.deque(maxlen=_TAIL_LINES) if tail is None else tail
        self._prefix = b"" if rank == 0 else f"[rank {rank}] ".encode()
        self._joint = joint
        self._log = log
        self._held = b""
        self._held_since = 0.0

    def feed(self, text: bytes, now: float) -> None:
        """Takes what the rank has just printed; passes on whole lines and holds back the rest."""
        if self._log is not None:
            self._log(text)
        self._held_since = now
        *lines, self._held = (self._held + text).split(b"\n")
        for line in lines:
            self._pass_on(line)
        if not self._prefix and b"\r" in self._held:
            shown, carriage_return, self._held = self._held.rpartition(b"\r")
            self._joint.write(shown + carriage_return)

    def release(self, now: float) -> None:
        """Shows an unfinished line of rank 0 (a prompt, dots of progress) once its end is not following."""
        if self._held and not self._prefix and now - self._held_since >= _PARTIAL_LINE_SECS:
            self._joint.write(self._held)
            self._held = b""

    def close(self) -> None:
        """Passes on what is left when the rank has ended."""
        if self._held:
            self._pass_on(self._held)
            self._held = b""

    def _pass_on(self, line: bytes) -> None:
        # Of a line that was drawn over and over, only the last state is worth keeping.
        final = line.rstrip(b"\r").rpartition(b"\r")[2]
        self.tail.append(final.decode(errors="replace"))
        if self._prefix:
            self._joint.write_line(self._prefix + final)
        else:
            self._joint.write(line + b"\n")
