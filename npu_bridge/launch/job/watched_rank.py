"""What the launcher knows of a rank, wherever the rank runs: its output, what it reports, and how it has ended."""

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
from typing import Any, Protocol, TextIO

from npu_bridge.launch.job.first_failure import Ending, InputEnd
from npu_bridge.launch.job.hang import Position, StuckCall
from npu_bridge.launch.job.output import TAIL_LINES, JointStream, RankLog, RankOutput
from npu_bridge.session.elastic.stop_request import STOPPED_EXIT_CODE

__all__ = ["WatchedRank"]

# As ssh itself ends when the connection fails.
_LOST_EXIT_CODE = 255


class Process(Protocol):
    """The process of a rank, on this machine (`RankProcess`) or on another one (`RemoteProcess`).

    Attributes:
      is_stopped: whether it was stopped by a signal.
      loss: why nobody knows how it has ended; "" while that is known.
      heard_at: when it was heard of last, in seconds on the monotonic clock.
    """

    is_stopped: bool
    loss: str
    heard_at: float

    def poll(self) -> int | None:
        """The exit code (minus the signal that has killed it); None while it runs."""

    def send_signal(self, number: int) -> None:
        """Sends a signal to it and to every process it started and that has not left its session."""

    def ask(self, order: str) -> None:
        """Asks it for something, in words that `rank.link` knows."""

    def drain(self, *names: str) -> None:
        """Takes what is left of its output."""

    def close(self) -> None:
        """Closes what it is read through."""


class WatchedRank:
    """A rank as seen from outside, around the process that runs it.

    Whoever makes one gives it a `process` that calls `take`, of this machine or of another one.

    Args:
      rank: its number.
      streams: the launcher's standard output and error, by the names "stdout" and "stderr".
      log: takes all it prints, as well.
    Attributes:
      process: what runs it.
      ending: how it has ended; None while it runs.
      stuck: the call its main thread does not return from, as far as it has reported one.
      position: where its main thread was when it was last asked.
      input_end: where it came to the end of its input; None while it trains.
      heeds: whether it would end after a whole step if it was asked to, and `has_heeded` whether it ever would have.
      was_told: the signal by which somebody else has asked it to; "" if nobody has.
      begun: how many training runs it had begun when it was asked to begin no more; None before it has answered.
      stopped_after: the global step after which it has ended because it was asked to, as far as one is known.
    """

    def __init__(self, rank: int, streams: dict[str, JointStream], log: RankLog | None = None):
        self.rank = rank
        self.process: Process
        self.ending: Ending | None = None
        self.stuck: StuckCall | None = None
        self.position: Position | None = None
        self.input_end: InputEnd | None = None
        self.heeds = self.has_heeded = False
        self.was_told = ""
        self.begun: int | None = None
        self.stopped_after: int | None = None
        self._has_finished = self._has_stopped = False
        self._log = log
        self._tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        self._outputs = {
            name: RankOutput(rank, joint, self._tail, log and functools.partial(log.feed, name))
            for name, joint in streams.items()
        }
        self._report: dict[str, Any] = {}
        self._unread = b""

    @property
    def is_running(self) -> bool:
        return self.ending is None

    def take(self, channel: str, text: bytes, lead_secs: float = 0.0) -> None:
        """Takes what has come through a channel of the rank's process.

        Args:
          channel: "stdout", "stderr" or "link".
          text: any piece of it; the link carries lines of JSON.
          lead_secs: what the launcher's clock shows more than the rank's.
        """
        if channel != "link":
            self._outputs[channel].feed(text, time.monotonic())
            return
        *messages, self._unread = (self._unread + text).split(b"\n")
        for message in map(json.loads, messages):
            if "stuck" in message:
                stuck = StuckCall(**message["stuck"]) if message["stuck"] else None
                self.stuck = stuck and stuck._replace(since=stuck.since + lead_secs, busy_at=stuck.busy_at + lead_secs)
            elif "position" in message:
                self.position = Position(**message["position"])
            elif "input_end" in message:
                self.input_end = InputEnd(**message["input_end"]) if message["input_end"] else None
            elif "heeds" in message:
                self.heeds = message["heeds"]
                self.has_heeded |= self.heeds
            elif "begun" in message:
                self.begun = message["begun"]
            elif "was_told" in message:
                self.was_told = message["was_told"]
            elif "stopped_after" in message:
                self._has_stopped, self.stopped_after = True, message["stopped_after"]
            elif "finished" in message:
                self._has_finished, self.stuck = True, None
            else:
                self._report = message["ending"]
                self._report["when"] += lead_secs
                if self._log is not None:
                    self._log.feed("stderr", self._report["trace"].encode())  # the rank itself has not printed it

    def poll(self) -> Ending | None:
        """How the rank has ended; a failure it has reported counts before its process is gone."""
        for output in self._outputs.values():
            output.release(time.monotonic())
        code = self.process.poll()
        if self.ending is None and code is not None:
            self.ending = self._describe_end(code)
        elif self.ending is None and self.process.loss:
            self.ending = Ending(self.rank, self.process.heard_at, _LOST_EXIT_CODE, loss=self.process.loss)
        return self.ending or (self._describe_end(self._report["code"]) if self._report else None)

    def _describe_end(self, code: int) -> Ending:
        report = self._report
        return Ending(
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

    def drain(self) -> None:
        """Passes on what is left of its output, without waiting for whoever else may hold its pipes open."""
        self.process.drain("stdout", "stderr")
        for output in self._outputs.values():
            output.close()

    def close(self) -> None:
        """Gives back what is open; the rank must have ended."""
        self.process.close()
        if self._log is not None:
            self._log.close()

    def open_channel(self, name: str) -> tuple[int, int] | None:
        """For `RankProcess`: a pipe. Rank 0 keeps a terminal, so that progress bars are bars; when logged, a copy."""
        stream = getattr(sys, name)
        if self.rank > 0 or not stream.isatty():
            return os.pipe()
        return None if self._log is None else _open_terminal_like(stream)


def _open_terminal_like(stream: TextIO) -> tuple[int, int]:
    """Opens a pseudo-terminal of the size of a stream's terminal: the ends for the launcher and for the rank.

    Text passes through it unchanged: turning newlines into what a screen needs is left to the real terminal.
    """
    ours, theirs = pty.openpty()
    tty.setraw(theirs)
    size = fcntl.ioctl(stream.fileno(), termios.TIOCGWINSZ, b"\0" * 8)
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, size)
    return ours, theirs
