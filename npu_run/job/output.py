"""Passes the output of ranks on to the launcher's streams and to log files, and keeps the last lines of each rank."""

from __future__ import annotations

import collections
import errno
import io
import os
import re
import select
import time
from pathlib import Path
from typing import BinaryIO, Callable

from npu_bridge.base.secondary_files import GrowingFile, NonFatalOutput, describe_failure
from npu_run.errors import LaunchError

# How many last lines are shown of a failed rank's output, or of its traceback.
TAIL_LINES = 40
LOG_FILES = rb"^--- \d{4}-\d\d-\d\d "  # how logs of ranks begin

# Python's unbuffered `print` writes each argument and the newline separately: long enough for them to arrive from a
# rank that waits for a processor, too short to disturb.
_PARTIAL_LINE_SECS = 0.25
_TAIL_LINE_BYTES = 4096
_TICK_SECS = 0.25
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
_GAP = "--- {count} bytes are not here: {reason}\n"
# Log messages of TensorFlow, Horovod and Gloo on a rank after another one has failed: the launcher reports the failure
# once. And one of TensorFlow's servers about the end of each step, which is no failure. TensorFlow 2.15 and Horovod
# 0.28 log with a date; TensorFlow from 2.16 on logs like absl, and adds the operator.
_SECONDARY_MESSAGES = re.compile(
    rb"(\[?\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[.\d]*: [WEF] |[WEF]\d{4} [\d:.]+ +\d+ |  what\(\):  ).*"
    rb"(Horovod has been shut down|Horovod background loop uncaught|/gloo/transport/tcp/"
    rb"|Local rendezvous is aborting with status: ABORTED: Cleanup)"
    rb"|terminate called after throwing an instance of 'gloo::"
)
_THEIR_OPERATOR = b"\t [[{{node "


class OutputReaderGoneError(Exception):
    """Raised if the reader of one of the launcher's streams is gone."""


class JointStream:
    """An output stream of the launcher, shared by all ranks.

    Args:
      stream: the destination; None (Python's value for a closed stream) discards everything.
      name: the stream's name in messages.
      say: prints a line elsewhere if the stream leads to a file that cannot be written.
      is_stopping: returns whether the job is to end. Text that is not read is then left out, as the ranks must be told.
    """

    def __init__(
        self,
        stream: BinaryIO | None,
        name: str = "the output",
        say: Callable[[str], None] | None = None,
        is_stopping: Callable[[], bool] = lambda: False,
    ):
        self._stream = getattr(stream, "raw", stream)  # a buffer would retry a failed write for ever
        self._is_file = isinstance(self._stream, io.FileIO)
        self._is_stopping = is_stopping
        self._left_out = 0  # bytes
        self._secondary = NonFatalOutput(name, say=say)
        self._is_mid_line = False

    def write(self, text: bytes) -> None:
        """Writes text of rank 0 at once; the text can be part of a line, or a progress bar that ends in `\\r`.

        Raises:
          OutputReaderGoneError: the stream's reader is gone.
        """
        if self._stream is not None:
            self._secondary.attempt(self._write, text)
        # The line that counts left-out bytes begins and ends with a newline.
        self._is_mid_line = not text.endswith(b"\n") and not self._left_out

    def _write(self, text: bytes) -> None:
        left = memoryview(text)
        try:
            while left and self._is_read():
                if self._left_out:
                    count, self._left_out = self._left_out, 0
                    self._stream.write(b"\n" + _GAP.format(count=count, reason="they were not read").encode())
                    continue
                count = self._stream.write(left[: select.PIPE_BUF])  # so much never blocks in a pipe
                left = left[count or 0 :]  # None: another process has made the stream non-blocking
            self._left_out += len(left)
            self._stream.flush()
        except BrokenPipeError:
            raise OutputReaderGoneError(self._secondary.what) from None

    def _is_read(self) -> bool:
        """Waits until the stream takes text; returns False if it does not, and the job is to end."""
        while self._is_file and not select.select([], [self._stream], [], 0.0 if self._left_out else _TICK_SECS)[1]:
            if self._is_stopping():
                return False
        return True

    def write_line(self, line: bytes) -> None:
        """Writes a line of another rank and a newline; first ends an unfinished line, if there is one."""
        self.write((b"\n" if self._is_mid_line else b"") + line + b"\n")


class RankOutput:
    """Passes one output stream of a rank on to the joint stream.

    Args:
      rank: the rank that prints.
      joint: the destination.
      tail: the rank's last lines, for a report of its failure; both streams of a rank share them.
      log: called with all text as it arrives.
    """

    def __init__(
        self,
        rank: int,
        joint: JointStream,
        tail: collections.deque[str] | None = None,
        log: Callable[[bytes], None] | None = None,
    ):
        self.tail = collections.deque(maxlen=TAIL_LINES) if tail is None else tail
        self._prefix = b"" if rank == 0 else f"[rank {rank}] ".encode()
        self._joint = joint
        self._log = log
        self._held = bytearray()
        self._has_left_out = False
        self._held_since = 0.0

    def receive_output(self, text: bytes, now: float) -> None:
        """Receives new output of the rank; passes on whole lines and holds back the rest."""
        if self._log is not None:
            self._log(text)
        if not self._held:
            self._held_since = now
        # Held-back text is searched only once: a line can be many megabytes long.
        *lines, rest = text.split(b"\n")
        for line in lines:
            self._held += line
            self._write_line_to_joint_output(self._clear_held_text())
            self._held_since = now
        self._held += rest
        if b"\r" in rest and self._prefix:
            self._held += _last_drawn_text(self._clear_held_text())
        elif b"\r" in rest:
            shown, carriage_return, unfinished = self._clear_held_text().rpartition(b"\r")
            self._joint.write(shown + carriage_return)
            self._held += unfinished

    def write_unfinished_line(self, now: float) -> None:
        """Passes on an unfinished line of rank 0 (a prompt, dots of progress) if the rest does not follow soon."""
        if self._held and not self._prefix and now - self._held_since >= _PARTIAL_LINE_SECS:
            self._joint.write(self._clear_held_text())

    def close(self) -> None:
        """Passes on the text held back; called when the rank has ended."""
        if self._held:
            self._write_line_to_joint_output(self._clear_held_text())

    def _clear_held_text(self) -> bytes:
        held = bytes(self._held)
        self._held.clear()
        return held

    def _write_line_to_joint_output(self, line: bytes) -> None:
        final = _last_drawn_text(line).rstrip(b"\r")
        self.tail.append(final[-_TAIL_LINE_BYTES:].decode(errors="replace"))
        goes_on = self._has_left_out and final.startswith(_THEIR_OPERATOR)
        self._has_left_out = goes_on or _SECONDARY_MESSAGES.match(final) is not None
        if self._has_left_out:
            return  # only the log keeps it
        if self._prefix:
            self._joint.write_line(self._prefix + final)
        else:
            self._joint.write(line + b"\n")


class RankLog:
    """The log file `rank_<n>.log` in a folder; each run appends to it.

    If the log cannot be written, the job continues. A line reports this, and another line reports when writing works
    again.

    Args:
      folder: folder of the log, created if missing.
      rank: the rank that prints.
      title: text for the line above this run's output.
      say: function that prints a line.
    Raises:
      LaunchError: `folder` is not a folder, or is not writable. A full disk raises no error.
    """

    def __init__(self, folder: str | os.PathLike, rank: int, title: str, say: Callable[[str], None] | None = None):
        path = Path(folder) / f"rank_{rank}.log"
        self._file = GrowingFile(path, "the log", gap=_GAP, say=say)
        try:
            self._file.open()
        except OSError as error:
            # A log of an earlier attempt shows that the folder is the right one.
            if error.errno not in _NO_ROOM and not path.is_file():
                why = describe_failure(error)
                raise LaunchError(f"--out {folder} cannot be written ({why}). Name another folder.") from error
        self._file.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {title}\n".encode(errors="replace"))
        self._held: dict[str, bytearray] = {}

    def receive_output(self, stream: str, text: bytes) -> None:
        """Receives new output of one of the rank's streams; writes whole lines."""
        held = self._held.setdefault(stream, bytearray())
        # Held-back text is searched only once: a line can be many megabytes long.
        *lines, rest = text.split(b"\n")
        whole = bytearray()
        for line in lines:
            whole += _last_drawn_text(held + line).rstrip(b"\r") + b"\n"
            held.clear()
        if whole:
            self._file.write(whole)
        held += rest
        if b"\r" in rest:
            held[:] = _last_drawn_text(held)

    def close(self) -> None:
        """Writes the text held back, and closes the file."""
        for rest in self._held.values():
            if rest:
                self._file.write(_last_drawn_text(rest).rstrip(b"\r") + b"\n")
        self._held.clear()
        self._file.close()


def _last_drawn_text(line: bytes | bytearray) -> bytes:
    """Returns the last state of a line that is redrawn with `\\r`, with the final `\\r` if there is one."""
    line = bytes(line)
    drawn = line.rstrip(b"\r")
    return drawn.rpartition(b"\r")[2] + line[len(drawn) :][:1]
