"""What the launcher knows of a rank, wherever the rank runs: its output, what it reports, and how it has ended."""

from __future__ import annotations

import collections
import functools
import json
import time
from typing import Any

from npu_bridge.launch.first_failure import Ending
from npu_bridge.launch.rank_log import RankLog
from npu_bridge.launch.rank_output import JointStream, RankOutput
from npu_bridge.launch.stall import Place, Still

__all__ = ["WatchedRank"]


class WatchedRank:
    """A rank as seen from outside; what runs it feeds it.

    Args:
      rank: its number.
      log: takes all it prints, as well.
    """

    def __init__(self, rank: int, log: RankLog | None = None):
        self.rank = rank
        self.ending: Ending | None = None
        self.still: Still | None = None
        self.place: Place | None = None
        self._has_finished = False
        self._log = log
        self._outputs: dict[str, RankOutput] = {}
        self._tail: collections.deque[str] = collections.deque()
        self._report: dict[str, Any] = {}
        self._unread = b""

    def open_output(self, name: str, joint: JointStream) -> None:
        """Makes "stdout" or "stderr" of the rank go to one of the launcher's own streams."""
        log = None if self._log is None else functools.partial(self._log.feed, name)
        output = RankOutput(self.rank, joint, tail=self._tail if self._outputs else None, log=log)
        self._tail = output.tail
        self._outputs[name] = output

    def feed(self, name: str, text: bytes) -> None:
        """Takes what the rank has printed."""
        self._outputs[name].feed(text, time.monotonic())

    def hear(self, text: bytes, lead_secs: float = 0.0) -> None:
        """Takes what came through the link.

        Args:
          text: any piece of the lines of JSON that a rank sends.
          lead_secs: what the launcher's clock shows more than the rank's.
        """
        *messages, self._unread = (self._unread + text).split(b"\n")
        for message in map(json.loads, messages):
            if "still" in message:
                still = Still(**message["still"]) if message["still"] else None
                self.still = still and still._replace(since=still.since + lead_secs, busy_at=still.busy_at + lead_secs)
            elif "place" in message:
                self.place = Place(**message["place"])
            elif "finished" in message:
                self._has_finished = True
            else:
                self._report = message["ending"]
                self._report["when"] += lead_secs
                if self._report.get("echo") and self._log is not None:
                    self._log.feed("stderr", self._report["trace"].encode())  # the rank itself has not printed it

    def release(self) -> None:
        """Shows what the rank has left unfinished, once nothing more is following."""
        for output in self._outputs.values():
            output.release(time.monotonic())

    def reported_ending(self) -> Ending | None:
        """How the rank says that it is about to end: that counts before its process is gone."""
        return self.describe_end(self._report["code"]) if self._report else None

    def describe_end(self, code: int) -> Ending:
        """The end of the rank, from its exit code (minus the signal that killed it) and its report."""
        report = self._report
        return Ending(
            rank=self.rank,
            when=report.get("when", time.monotonic()),
            exit_code=code if code >= 0 else 128 - code,
            signal_number=-code if code < 0 else None,
            summary=report.get("summary", ""),
            trace=report.get("trace") or "\n".join(self._tail),
            is_echo=report.get("echo", False),
            tensor=report.get("tensor", ""),
            is_unfinished=code == 0 and not self._has_finished,
        )

    def finish_output(self) -> None:
        """Passes on what is left of unfinished lines."""
        for output in self._outputs.values():
            output.close()

    def close_log(self) -> None:
        if self._log is not None:
            self._log.close()
