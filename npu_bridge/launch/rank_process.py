"""One rank as a process of this machine: a session of its own, watched through a link, stopped with all it started."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Callable

from npu_bridge.launch.first_failure import Ending
from npu_bridge.launch.rank_log import RankLog
from npu_bridge.launch.rank_output import JointStream
from npu_bridge.launch.terminal import open_terminal_like
from npu_bridge.launch.watched_rank import WatchedRank

__all__ = ["RankProcess", "is_stopped", "rank_command", "signal_group"]

_CHUNK_BYTES = 65536


def rank_command(script: str, arguments: list[str], devices: Sequence[int] = (), link: int | None = None) -> list[str]:
    """The command line of one rank, on the interpreter that runs the launcher.

    Args:
      script: a Python file.
      arguments: the script's own.
      devices: device of each rank, from a rank table; without, the local rank is the device.
      link: descriptor of the rank's end of the link.
    """
    options = [] if link is None else ["--link", str(link)]
    options += ["--devices", ",".join(map(str, devices))] if devices else []
    return [sys.executable, "-m", "npu_bridge.launch.rank_main", *options, script, *arguments]


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal, as far as the system tells."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()[0] in ("T", "t")
    return False


def signal_group(pid: int, number: int) -> None:
    """Sends a signal to a rank and to every process it started and that has not left its session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


class RankProcess(WatchedRank):
    """A running rank.

    Args:
      rank: its number.
      command: its command line, as a function of its end of the link.
      environment: all its environment variables.
      streams: the launcher's standard output and error, by the names "stdout" and "stderr".
      log: takes all it prints, as well.
    """

    def __init__(
        self,
        rank: int,
        command: Callable[[int], list[str]],
        environment: dict[str, str],
        streams: dict[str, JointStream],
        log: RankLog | None = None,
    ):
        super().__init__(rank, log)
        self._link, rank_end = socket.socketpair()
        self._pipes: dict[int, str] = {}
        with rank_end, contextlib.ExitStack() as theirs:
            files = {name: self._open(name, joint, theirs) for name, joint in streams.items()}
            self._process = subprocess.Popen(
                command(rank_end.fileno()),
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=(rank_end.fileno(),),
                **files,
            )
        for file in self.files():
            os.set_blocking(file, False)

    def _open(self, name: str, joint: JointStream, theirs: contextlib.ExitStack) -> int | None:
        """Makes one stream of the rank; gives the descriptor the rank writes to, None for the launcher's own."""
        stream = getattr(sys, name)
        # Rank 0 keeps a terminal, so that its progress bars can be bars.
        if self.rank == 0 and stream.isatty():
            if self._log is None:
                return None
            ours, their_end = open_terminal_like(stream)
        else:
            ours, their_end = os.pipe()
        theirs.callback(os.close, their_end)
        self.open_output(name, joint)
        self._pipes[ours] = name
        return their_end

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.returncode is None

    @property
    def is_stopped(self) -> bool:
        """Whether its process is stopped by a signal, as far as the system tells."""
        return is_stopped(self.pid)

    def files(self) -> list[int]:
        """The descriptors from which something can be read."""
        return [self._link.fileno(), *self._pipes]

    def read(self, file: int) -> bool:
        """Takes what one of `files()` holds; False when it came to its end and is no longer one of them."""
        return self._take(file) != b""

    def poll(self) -> Ending | None:
        """How the rank ended, once it has; a failure it has reported counts before the process is gone."""
        self.release()
        code = self._process.poll()
        if self.ending is None and code is not None:
            while self._take(self._link.fileno()):
                pass
            self.ending = self.describe_end(code)
        return self.ending or self.reported_ending()

    def send_signal(self, number: int) -> None:
        """Sends a signal to the rank and to every process it started and that has not left its session."""
        signal_group(self.pid, number)

    def leave_horovod(self) -> None:
        """Asks the rank to shut Horovod down, so that ranks that wait in a collective raise."""
        with contextlib.suppress(OSError):
            self._link.send(b"x")

    def drain(self) -> None:
        """Passes on what is left in the pipes, without waiting for whoever else may hold them open."""
        for file in list(self._pipes):
            while self._take(file):
                pass
        self.finish_output()

    def close(self) -> None:
        """Gives back what is open; the rank must have ended."""
        for file in self._pipes:
            os.close(file)
        self._pipes.clear()
        self._link.close()
        self.close_log()

    def _take(self, file: int) -> bytes | None:
        """Reads once: the text, nothing at the end of the file, None when there is no text yet."""
        try:
            text = os.read(file, _CHUNK_BYTES)
        except BlockingIOError:
            return None
        except OSError as error:
            # The other end is gone; a pseudo-terminal says it in its own way.
            if error.errno not in (errno.ECONNRESET, errno.EIO):
                raise
            text = b""
        if file == self._link.fileno():
            self.hear(text)
        elif text:
            self.feed(self._pipes[file], text)
        else:
            del self._pipes[file]
            os.close(file)
        return text
