"""Holds the launcher's knowledge of a rank, on this or another host: its output, its reports, and its end."""

from __future__ import annotations

import collections
import fcntl
import functools
import json
import os
import pty
import sys
import termios
import time
import tty
from typing import Any, TextIO

from npu_bridge.session.elastic.stop_request import STOPPED_EXIT_CODE
from npu_run.job.first_failure import InputEnd, RankEnding
from npu_run.job.hang import StuckCall, ThreadPosition
from npu_run.job.output import TAIL_LINES, JointStream, RankLog, RankOutput

# The exit code of ssh when the connection fails.
_LOST_EXIT_CODE = 255


class WatchedRank:
    """A rank as the launcher sees it: the rank's process, and all that it has reported.

    The creator must set `process`, which must call `receive` with the rank's output.

    Args:
      rank: number of the rank.
      streams: the launcher's output streams, under the names "stdout" and "stderr".
      log: the rank's log, which also gets all output; None without logs.
    Attributes:
      process: the process that runs the rank: a `RankProcess`, or on another host a `RemoteProcess`.
      ending: how the rank ended; None while it runs.
      stuck: the reported call in which the rank's main thread is stuck, or None.
      position: the position of the rank's main thread when the rank was last asked.
      input_end: where the rank's input ended; None while the rank trains.
      can_stop_after_step: whether the rank would end after a whole step on request.
      could_stop_after_step: whether `can_stop_after_step` was ever True.
      received_signal: name of the signal to end that the rank has received from another process; "" without one.
      begun: number of training runs that the rank had begun when it was asked to begin no more; None until it answers.
      stopped_after: the global step after which the rank ended on request, if known.
    """

    def __init__(self, rank: int, streams: dict[str, JointStream], log: RankLog | None = None):
        self.rank = rank
        self.process: Any
        self.ending: RankEnding | None = None
        self.stuck: StuckCall | None = None
        self.position: ThreadPosition | None = None
        self.input_end: InputEnd | None = None
        self.can_stop_after_step = self.could_stop_after_step = False
        self.received_signal = ""
        self.begun: int | None = None
        self.stopped_after: int | None = None
        self._has_finished = self._has_stopped = False
        self._log = log
        self._tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        self._outputs = {
            name: RankOutput(rank, joint, self._tail, log and functools.partial(log.receive_output, name))
            for name, joint in streams.items()
        }
        self._report: dict[str, Any] = {}
        self._unread = b""

    @property
    def is_running(self) -> bool:
        return self.ending is None

    def receive(self, channel: str, text: bytes, clock_lead_secs: float = 0.0) -> None:
        """Receives text from a channel of the rank's process.

        Args:
          channel: "stdout", "stderr" or "link".
          text: any piece of the text; the link carries lines of JSON.
          clock_lead_secs: how many seconds the launcher's clock is ahead of the rank's clock.
        """
        if channel != "link":
            self._outputs[channel].receive_output(text, time.monotonic())
            return
        *messages, self._unread = (self._unread + text).split(b"\n")
        for message in map(json.loads, messages):
            if "stuck" in message:
                stuck = StuckCall(**message["stuck"]) if message["stuck"] else None
                self.stuck = stuck and stuck._replace(
                    since=stuck.since + clock_lead_secs, busy_at=stuck.busy_at + clock_lead_secs
                )
            elif "position" in message:
                self.position = ThreadPosition(**message["position"])
            elif "input_end" in message:
                self.input_end = InputEnd(**message["input_end"]) if message["input_end"] else None
            elif "can_stop_after_step" in message:
                self.can_stop_after_step = message["can_stop_after_step"]
                self.could_stop_after_step |= self.can_stop_after_step
            elif "begun" in message:
                self.begun = message["begun"]
            elif "received_signal" in message:
                self.received_signal = message["received_signal"]
            elif "stopped_after" in message:
                self._has_stopped, self.stopped_after = True, message["stopped_after"]
            elif "finished" in message:
                self._has_finished, self.stuck = True, None
            else:
                self._report = message["ending"]
                self._report["when"] += clock_lead_secs
                if self._log is not None:
                    # The rank itself has not printed it.
                    self._log.receive_output("stderr", self._report["trace"].encode(errors="backslashreplace"))

    def poll(self) -> RankEnding | None:
        """Returns how the rank ended, or None; a reported failure counts even while the process still runs."""
        for output in self._outputs.values():
            output.write_unfinished_line(time.monotonic())
        code = self.process.poll()
        if self.ending is None and code is not None:
            self.ending = self._describe_end(code)
        elif self.ending is None and self.process.disconnect_reason:
            why = self.process.disconnect_reason
            self.ending = RankEnding(self.rank, self.process.last_sign_of_life, _LOST_EXIT_CODE, disconnect_reason=why)
        return self.ending or (self._describe_end(self._report["code"]) if self._report else None)

    def _describe_end(self, code: int) -> RankEnding:
        report = self._report
        return RankEnding(
            rank=self.rank,
            when=report.get("when", time.monotonic()),
            exit_code=code if code >= 0 else 128 - code,
            signal_number=-code if code < 0 else None,
            summary=report.get("summary", ""),
            trace=report.get("trace") or "\n".join(self._tail),
            is_secondary=report.get("secondary", False),
            tensor=report.get("tensor", ""),
            is_unfinished=code == 0 and not self._has_finished,
            is_stopped=self._has_stopped and code == STOPPED_EXIT_CODE,
        )

    def read_remaining_output(self) -> None:
        """Passes on the rest of the rank's output; does not wait for other processes that hold the pipes open."""
        self.process.read_remaining_output("stdout", "stderr")
        for output in self._outputs.values():
            output.close()

    def close(self) -> None:
        """Closes files and connections; the rank must have ended."""
        self.process.close()
        if self._log is not None:
            self._log.close()

    def open_channel(self, name: str) -> tuple[int, int] | None:
        """Opens a pipe for an output of the rank; for rank 0 on a terminal with a log, opens a pseudo-terminal.

        Returns None if rank 0 writes directly to the terminal, on which progress bars then work.
        """
        stream = getattr(sys, name)
        if self.rank > 0 or not stream.isatty():
            return os.pipe()
        return None if self._log is None else _open_pseudo_terminal_for(stream)


def _open_pseudo_terminal_for(stream: TextIO) -> tuple[int, int]:
    """Opens a pseudo-terminal as large as a stream's terminal; returns the launcher's end and the rank's end.

    Text passes through the pseudo-terminal unchanged; the real terminal converts the newlines.
    """
    ours, theirs = pty.openpty()
    tty.setraw(theirs)
    size = fcntl.ioctl(stream.fileno(), termios.TIOCGWINSZ, b"\0" * 8)
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, size)
    return ours, theirs
