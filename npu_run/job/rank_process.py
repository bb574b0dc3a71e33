"""Runs the process of a rank: command line, environment, output, link, signals and exit code.

`npu-run` uses this module for ranks on its own machine; the agents on other hosts use it for ranks there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import subprocess
import time
from collections.abc import Sequence
from typing import Any, Callable

from npu_bridge.base.machine import usable_cores
from npu_bridge.base.module_command import module_command
from npu_run.errors import LaunchError
from npu_run.job.limits import Limit, describe_process_limit, restore_open_file_limit

_CHUNK_BYTES = 65536
_MOST_HELD_BYTES = 2**20  # the most that a pipe holds
# How often to check all processes for their end, in case the system has not reported it.
_ROUND_SECS = 1.0


def rank_command(script: str, arguments: list[str], devices: Sequence[int] = (), link: int | None = None) -> list[str]:
    """Returns the command line of a rank, with the launcher's own interpreter.

    Args:
      script: a Python file.
      arguments: arguments of the script.
      devices: device of each rank, from a rank table; if empty, the device is the local rank.
      link: file descriptor of the rank's end of the link.
    """
    options = [] if link is None else ["--link", str(link)]
    options += ["--devices", ",".join(map(str, devices))] if devices else []
    return module_command("npu_run.rank.main", *options, script, *arguments)


def default_rank_environment(ranks_on_host: int) -> dict[str, str]:
    """Returns the default environment variables of a rank; variables in the caller's environment win.

    Args:
      ranks_on_host: number of ranks on this machine, among which the cores are divided.
    """
    defaults = {"TF_CPP_MIN_LOG_LEVEL": "1", "PYTHONUNBUFFERED": "1"}
    if ranks_on_host > 1:  # a single rank has all cores, and its script decides how to use them
        share = max(1, usable_cores() // ranks_on_host)
        defaults |= {"OMP_NUM_THREADS": str(share), "TF_NUM_INTRAOP_THREADS": str(share)}
        # A collective that waits must not keep other ops from running.
        defaults["TF_NUM_INTEROP_THREADS"] = str(max(2, share))
    return defaults


class RankProcess:
    """A rank on this machine, in its own process session, so that signals also reach processes that it starts.

    Its channels are "stdout", "stderr" and "link" (a socket through which the rank reports).

    Args:
      command: returns the command line for a given file descriptor of the rank's end of the link.
      environment: all environment variables of the process.
      receive: called with the name of a channel and each piece of text from it.
      open_channel: opens "stdout" or "stderr"; returns a descriptor to read from and a descriptor for the rank to write
        to. Returns None if the rank is to write to this process's own stream.
      open_files: the rank's limit on open files; None for this process's own limit.
    Raises:
      LaunchError: a limit on processes is reached.
    """

    disconnect_reason = ""  # why its end is unknown: on this machine it is always known

    def __init__(
        self,
        command: Callable[[int], list[str]],
        environment: dict[str, str],
        receive: Callable[[str, bytes], None],
        open_channel: Callable[[str], tuple[int, int] | None] = lambda name: os.pipe(),
        open_files: Limit | None = None,
    ):
        self._receive = receive
        link, rank_end = socket.socketpair()
        self._channels = {link.detach(): "link"}
        with rank_end, contextlib.ExitStack() as theirs:
            files = {}
            for name in ("stdout", "stderr"):
                ends = open_channel(name)
                if ends is not None:
                    self._channels[ends[0]], files[name] = name, ends[1]
                    theirs.callback(os.close, ends[1])
            try:
                self._process = subprocess.Popen(
                    command(rank_end.fileno()),
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    pass_fds=(rank_end.fileno(),),
                    **files,
                )
            except BlockingIOError as error:
                self.close()
                raise LaunchError(describe_process_limit(error)) from error
        restore_open_file_limit(self.pid, open_files)
        for file in self._channels:
            os.set_blocking(file, False)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_stopped(self) -> bool:
        """Whether the process is stopped by a signal (SIGSTOP, Ctrl-Z, a debugger), if the system shows this."""
        with contextlib.suppress(OSError):
            with open(f"/proc/{self._process.pid}/stat", encoding="utf-8", errors="replace") as file:
                return self._process.returncode is None and file.read().rpartition(")")[2].split()[0] in ("T", "t")
        return False

    def files(self) -> list[int]:
        """Returns the file descriptors to read from."""
        return list(self._channels)

    def read(self, file: int) -> int:
        """Passes on the available text of a descriptor in `files()`; returns its bytes, or 0 if none is available."""
        try:
            text = os.read(file, _CHUNK_BYTES)
        except BlockingIOError:
            return 0
        except OSError as error:
            # The other end is gone; a pseudo-terminal reports it with EIO.
            if error.errno not in (errno.ECONNRESET, errno.EIO):
                raise
            text = b""
        if text:
            self._receive(self._channels[file], text)
        else:
            del self._channels[file]
            os.close(file)
        return len(text)

    def read_remaining_output(self, *channels: str) -> None:
        """Passes on the remaining text of channels; other processes can hold them open and write more."""
        for file, name in list(self._channels.items()):
            left = _MOST_HELD_BYTES if name in channels else 0
            while left > 0 and (count := self.read(file)):
                left -= count

    def collect(self) -> bool:
        """Returns whether the process has ended; if it has, passes on its remaining reports."""
        if self._process.poll() is None:
            return False
        self.read_remaining_output("link")
        return True

    def poll(self) -> int | None:
        """Returns the exit code, or minus the number of a fatal signal; None until `collect` has seen the end."""
        return self._process.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal to the rank and to every process of the rank's process session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def send_order(self, order: str) -> None:
        """Sends the rank one of the orders that `rank/link.py` carries out, such as "hold"."""
        for file, name in list(self._channels.items()):
            if name == "link":
                with contextlib.suppress(OSError):
                    os.write(file, f"{order}\n".encode())

    def close(self) -> None:
        """Closes all channels."""
        for file in self._channels:
            os.close(file)
        self._channels.clear()


class OutputWatch:
    """Watches the output and the ends of many processes, at a cost that depends only on processes with news.

    A source is a `RankProcess`, or another object with methods `files` and `read`, such as a connection to a host.
    """

    def __init__(self):
        self._selector = selectors.DefaultSelector()
        self._files: dict[Any, list[int]] = {}
        self._running: dict[int, RankProcess] = {}
        self._round_at = 0.0

    def add(self, source: Any) -> None:
        """Adds a source to watch."""
        self._files[source] = source.files()
        for file in source.files():
            self._selector.register(file, selectors.EVENT_READ, source)
        if isinstance(source, RankProcess):
            self._running[source.pid] = source

    def wait_for_news(self, secs: float) -> list[RankProcess]:
        """Passes on output for `secs`, or until all processes have ended. Returns the processes that have ended."""
        ended: list[RankProcess] = []
        limit = time.monotonic() + secs
        while True:
            for key, _ in self._selector.select(max(limit - time.monotonic(), 0.0)):
                key.data.read(key.fd)
                self._forget_closed_files(key.data)
            ended += self._collect_ended_processes()
            if time.monotonic() >= limit or (ended and not self._running):
                return ended

    def close(self) -> None:
        """Stops watching all sources."""
        self._selector.close()

    def _forget_closed_files(self, source: Any) -> None:
        left = source.files()
        for file in self._files[source]:
            if file not in left:
                self._selector.unregister(file)
        self._files[source] = left

    def _collect_ended_processes(self) -> list[RankProcess]:
        """Returns the processes that have ended; where the system names them, the others need not be checked."""
        ended = []
        names_ended = hasattr(os, "waitid")  # not on macOS before Python 3.13
        with contextlib.suppress(ChildProcessError):
            while names_ended and (child := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)):
                if child.si_pid not in self._running:
                    self._round_at = 0.0  # another process, which can hide one of these
                    break
                ended.append(self._running.pop(child.si_pid))
                ended[-1].collect()
        if self._running and (not names_ended or time.monotonic() >= self._round_at + _ROUND_SECS):
            self._round_at = time.monotonic()
            missed = [process for process in self._running.values() if process.collect()]
            ended += [self._running.pop(process.pid) for process in missed]
        for process in ended:
            self._forget_closed_files(process)
        return ended
