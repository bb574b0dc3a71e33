"""What ranks print, brought together: rank 0 as it is, every other rank line by line behind `[rank n] `."""

from __future__ import annotations

import collections
import re
from typing import BinaryIO, Callable

__all__ = ["JointStream", "RankOutput", "last_state"]

# Python's unbuffered `print` writes the newline by itself: long enough for it to arrive, too short to notice.
_PARTIAL_LINE_SECS = 0.05
_TAIL_LINES = 40
_TAIL_LINE_BYTES = 4096
# What TensorFlow, Horovod and Gloo log on a rank when another one is gone (2.15, 0.28): the launcher says it in a line.
_AFTERMATH = re.compile(
    rb"(\[?\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[.\d]*: [WEF] |  what\(\):  ).*"
    rb"(Horovod has been shut down|Horovod background loop uncaught|/gloo/transport/tcp/)"
    rb"|terminate called after throwing an instance of 'gloo::"
)


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
        self._held = bytearray()
        self._held_since = 0.0

    def feed(self, text: bytes, now: float) -> None:
        """Takes what the rank has just printed; passes on whole lines and holds back the rest."""
        if self._log is not None:
            self._log(text)
        self._held_since = now
        # What is held back is looked at once: a line may be many megabytes long.
        *lines, rest = text.split(b"\n")
        for line in lines:
            self._held += line
            self._pass_on(self._take_held())
        self._held += rest
        if b"\r" in rest and self._prefix:
            self._held += last_state(self._take_held())
        elif b"\r" in rest:
            shown, carriage_return, unfinished = self._take_held().rpartition(b"\r")
            self._joint.write(shown + carriage_return)
            self._held += unfinished

    def release(self, now: float) -> None:
        """Shows an unfinished line of rank 0 (a prompt, dots of progress) once its end is not following."""
        if self._held and not self._prefix and now - self._held_since >= _PARTIAL_LINE_SECS:
            self._joint.write(self._take_held())

    def close(self) -> None:
        """Passes on what is left when the rank has ended."""
        if self._held:
            self._pass_on(self._take_held())

    def _take_held(self) -> bytes:
        held = bytes(self._held)
        self._held.clear()
        return held

    def _pass_on(self, line: bytes) -> None:
        final = last_state(line).rstrip(b"\r")
        self.tail.append(final[-_TAIL_LINE_BYTES:].decode(errors="replace"))
        if _AFTERMATH.match(final):
            return  # it stays in the log
        if self._prefix:
            self._joint.write_line(self._prefix + final)
        else:
            self._joint.write(line + b"\n")


def last_state(line: bytes) -> bytes:
    """Of a line that is drawn over and over, what is worth keeping: how it looks now, and whether it is begun anew."""
    drawn = line.rstrip(b"\r")
    return drawn.rpartition(b"\r")[2] + line[len(drawn) :][:1]
