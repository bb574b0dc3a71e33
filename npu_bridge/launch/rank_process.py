"""One rank as a process: started in its own session, watched through a link, stopped with all it started."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from typing import Any

from npu_bridge.launch.first_failure import Ending
from npu_bridge.launch.rank_output import JointStream, RankOutput

__all__ = ["RankProcess", "rank_command"]

_CHUNK_BYTES = 65536


def rank_command(script: str, arguments: list[str], link: int | None = None) -> list[str]:
    """The command line of one rank, on the interpreter that runs the launcher."""
    link_option = [] if link is None else ["--link", str(link)]
    return [sys.executable, "-m", "npu_bridge.launch.rank_main", *link_option, script, *arguments]


class RankProcess:
    """A running rank.

    Args:
      rank: its number.
      script: the Python file it runs.
      arguments: the script's own.
      environment: all its environment variables.
      streams: the launcher's standard output and error, by the names "stdout" and "stderr".
    """

    def __init__(
        self,
        rank: int,
        script: str,
        arguments: list[str],
        environment: dict[str, str],
        streams: dict[str, JointStream],
    ):
        self.rank = rank
        self.ending: Ending | None = None
        self._report: dict[str, Any] = {}
        self._tail: collections.deque[str] = collections.deque()
        self._link, rank_end = socket.socketpair()
        # Rank 0 keeps a terminal, so that its progress bars can be bars.
        pipes = {
            name: None if rank == 0 and getattr(sys, name).isatty() else subprocess.PIPE for name in streams
        }
        with rank_end:
            self._process = subprocess.Popen(
                rank_command(script, arguments, rank_end.fileno()),
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=(rank_end.fileno(),),
                **pipes,
            )
        self._outputs: dict[int, RankOutput] = {}
        for name, joint in streams.items():
            pipe = getattr(self._process, name)
            if pipe is not None:
                output = RankOutput(rank, joint, tail=None if not self._outputs else self._tail)
                self._tail = output.tail
                self._outputs[pipe.fileno()] = output
        for file in self.files():
            os.set_blocking(file, False)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.returncode is None

    def files(self) -> list[int]:
        """The descriptors from which something can be read."""
        return [self._link.fileno(), *self._outputs]

    def read(self, file: int) -> bool:
        """Takes what one of `files()` holds; False when it came to its end and is no longer one of them."""
        return self._take(file) != b""

    def poll(self) -> Ending | None:
        """How the rank ended, once it has; a failure it has reported counts before the process is gone."""
        for output in self._outputs.values():
            output.release(time.monotonic())
        code = self._process.poll()
        if self.ending is None and code is not None:
            self._take(self._link.fileno())
            self.ending = self._ending(code)
        if self.ending is None and self._report:
            return self._ending(self._report["code"])
        return self.ending

    def send_signal(self, number: int) -> None:
        """Sends a signal to the rank and to every process it started and that has not left its session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def drain(self) -> None:
        """Passes on what is left in the pipes, without waiting for whoever else may hold them open."""
        for file in list(self._outputs):
            while self._take(file):
                pass
        for output in self._outputs.values():
            output.close()

    def _take(self, file: int) -> bytes | None:
        """Reads once: the text, nothing at the end of the file, None when there is no text yet."""
        try:
            text = os.read(file, _CHUNK_BYTES)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            text = b""
        if file == self._link.fileno():
            self._report = json.loads(text) if text else self._report
        elif text:
            self._outputs[file].feed(text, time.monotonic())
        else:
            self._outputs.pop(file).close()
        return text

    def _ending(self, code: int) -> Ending:
        report = self._report
        return Ending(
            rank=self.rank,
            when=report.get("when", time.monotonic()),
            exit_code=code if code >= 0 else 128 - code,
            signal_number=-code if code < 0 else None,
            summary=report.get("summary", ""),
            trace=report.get("trace") or "\n".join(self._tail),
            is_echo=report.get("echo", False),
        )
