"""Connects the launcher to another host, usually through ssh, and controls the processes of ranks there."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from npu_bridge.base import environment
from npu_bridge.base.module_command import module_command
from npu_bridge.base.terminal import escape_controls
from npu_run.errors import LaunchError
from npu_run.job.output import JointStream
from npu_run.job.watched_rank import WatchedRank
from npu_run.remote.host_agent import LIFE_SIGN_SECS

# How long a host can be silent before it counts as lost. Longer than a short network failure with TCP's recovery;
# shorter than the 30 s after which Gloo gives up, so that the message names the host and not the rank that waits.
SILENCE_SECS = 20.0
# The limit before the first sign of life: DNS look-ups and reading Python from a cold network disk take time.
_START_SECS = 90.0
_CHUNK_BYTES = 65536
_SSH = ["ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=accept-new", "-o", "ConnectTimeout=15"]
_CLOSE_SECS = 5.0
# Variables that describe the launcher's own machine or terminal.
_LOCAL_VARIABLES = {"HOSTNAME", "HOST", "PWD", "OLDPWD", "SHLVL", "_", "DISPLAY", "XAUTHORITY", "LS_COLORS"}
_LOCAL_PREFIXES = ("BASH_FUNC_", "SSH_")


class RemoteHost:
    """A host with an agent that runs some of the ranks.

    Args:
      host: the host's name, for ssh.
      errors: receives ssh's own messages.
      silence_secs: how long launcher and agent each wait for a sign of life of the other end.
    Attributes:
      codes: exit codes of the ranks that have ended.
      stopped: ranks whose process was stopped by a signal when the host sent its last sign of life.
      disconnect_reason: why the connection is lost; "" while the connection works.
      last_sign_of_life: time of the last message from the host, in seconds on the monotonic clock.
    Raises:
      LaunchError: ssh is not installed on this machine.
    """

    def __init__(self, host: str, errors: JointStream, silence_secs: float = SILENCE_SECS):
        self.host = host
        self.codes: dict[int, int] = {}
        self.stopped: list[int] = []
        self.disconnect_reason = ""
        self.last_sign_of_life = time.monotonic()
        self._ranks: dict[int, WatchedRank] = {}
        self._errors = errors
        self._last_error = ""
        self._silence_secs = silence_secs
        self._limit_secs = max(_START_SECS, silence_secs)
        self._unread = b""
        self._is_closed = threading.Event()
        self._one_at_a_time = threading.Lock()
        self._pipes = self._open()
        self._output = self._pipes[0]

    def start(
        self,
        ranks: Sequence[WatchedRank],
        variables: Sequence[Mapping[str, str]],
        script: str,
        arguments: Sequence[str],
        devices: Sequence[int],
        peer: str,
    ) -> None:
        """Sends the job to the host.

        Args:
          ranks: the ranks that this host runs.
          variables: for each rank, the environment variables by which Horovod finds its peers.
          script: path of a Python file, relative to this process's folder; the file must exist on the host too.
          arguments: command-line arguments of the script.
          devices: device of each rank of the job, from a rank table; can be empty.
          peer: a host with other ranks; Gloo uses the interface on the route to this peer.
        """
        self._ranks = {rank.rank: rank for rank in ranks}
        self.send_message(
            silence_secs=self._silence_secs,
            ranks=[{"rank": rank.rank, "variables": dict(names)} for rank, names in zip(ranks, variables)],
            script=script,
            arguments=list(arguments),
            devices=list(devices),
            **self._shared_job_fields(peer),
        )
        threading.Thread(target=self._send_life_signs, name=f"npu-run {self.host}", daemon=True).start()

    def files(self) -> list[int]:
        """Returns the file descriptors of the connection that can still be read."""
        return list(self._pipes)

    def read(self, file: int) -> bool:
        """Handles the available text of a descriptor. Returns False at the end; `files()` then lacks the descriptor."""
        try:
            text = self._receive(file)
        except BlockingIOError:
            return True
        if not text:
            # `check_connection` can have read to the end of the file already.
            self._pipes = [pipe for pipe in self._pipes if pipe != file]
        elif file == self._output:
            self._handle_events(text)
        else:
            said = text.decode(errors="replace").replace("\r\n", "\n")
            self._errors.write(escape_controls(said).encode())
            self._last_error = (said.strip().splitlines() or [self._last_error])[-1]
        return bool(text)

    def check_connection(self) -> None:
        """Reads arrived events; sets `disconnect_reason` if the connection has ended or was silent for too long."""
        if self.disconnect_reason or self._is_closed.is_set():
            return
        reason = self._describe_end()
        limit = time.monotonic() - self._limit_secs
        if reason is not None or self.last_sign_of_life < limit:
            for file in list(self._pipes):
                self.read(file)
            reason = self._describe_end()
        # Another process can hold the error stream open: a connection of ssh that others share.
        if reason is not None and self._output not in self._pipes:
            self.disconnect_reason = reason
        elif self.last_sign_of_life < limit:
            self.disconnect_reason = f"nothing was heard from {self.host} for {self._limit_secs:.0f} s"

    def send_message(self, **message: Any) -> None:
        """Sends a message to the agent; has no effect if the connection has ended."""
        line = json.dumps(message).encode() + b"\n"
        # ValueError: the connection was closed here.
        with contextlib.suppress(OSError, ValueError), self._one_at_a_time:
            self._send(line)

    def close(self) -> None:
        """Closes the connection; the agent then ends all its processes."""
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        self._disconnect()

    def _open(self) -> list[int]:
        """Connects; returns non-blocking descriptors, one for the agent's events and one for ssh's messages."""
        try:
            self._process = subprocess.Popen(
                [*_SSH, "--", self.host, _agent_command()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                bufsize=0,
            )
        except FileNotFoundError as error:
            raise LaunchError(f"{self.host} is reached through ssh, which is not installed here.") from error
        files = [self._process.stdout.fileno(), self._process.stderr.fileno()]
        for file in files:
            os.set_blocking(file, False)
        return files

    def _shared_job_fields(self, peer: str) -> dict[str, Any]:
        """Returns the fields of the job message that concern all ranks of the host."""
        return {
            "peer": peer,
            "environment": {name: text for name, text in os.environ.items() if not _is_local_variable(name)},
        }

    def _receive(self, file: int) -> bytes:
        return os.read(file, _CHUNK_BYTES)

    def _send(self, line: bytes) -> None:
        self._process.stdin.write(line)

    def _describe_end(self) -> str | None:
        code = self._process.poll()
        reason = f": {self._last_error}" if self._last_error else ""
        return None if code is None else f"the connection to {self.host} has ended (ssh, exit code {code}{reason})"

    def _disconnect(self) -> None:
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.0 if self.disconnect_reason else _CLOSE_SECS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()
        self._process.stderr.close()

    def _send_life_signs(self) -> None:
        """Tells the launcher regularly that this host is alive, in a separate thread: writing can block."""
        while not self._is_closed.wait(LIFE_SIGN_SECS):
            self.send_message()

    def _handle_events(self, text: bytes) -> None:
        self.last_sign_of_life = time.monotonic()
        *lines, self._unread = (self._unread + text).split(b"\n")
        for line in lines:
            event = None
            with contextlib.suppress(ValueError):
                event = json.loads(line)
            if not isinstance(event, dict):  # printed by the remote shell as it starts, in a .bashrc for example
                if said := line.decode(errors="replace").strip():
                    self._errors.write_line(escape_controls(f"{self.host}: {said}").encode())
                continue
            self._limit_secs = self._silence_secs
            if "stopped" in event:
                self.stopped = event["stopped"]
            elif "received_signal" in event:
                for rank in self._ranks.values():
                    rank.received_signal = event["received_signal"]
            elif "code" in event:
                self.codes[event["rank"]] = event["code"]
            else:
                lead_secs = self.last_sign_of_life - event["now"]
                self._ranks[event["rank"]].receive(event["channel"], event["text"].encode("latin-1"), lead_secs)


class RemoteProcess:
    """A rank's process on another host, with the interface of `RankProcess`.

    The process's output arrives over the host's connection, together with the output of the host's other ranks.
    """

    def __init__(self, rank: int, host: RemoteHost):
        self._rank = rank
        self._host = host

    @property
    def is_stopped(self) -> bool:
        """Whether a signal had stopped the process when its host last reported."""
        return self._rank in self._host.stopped

    @property
    def disconnect_reason(self) -> str:
        """Why the state of the process is unknown; "" while the host answers."""
        return self._host.disconnect_reason

    @property
    def last_sign_of_life(self) -> float:
        return self._host.last_sign_of_life

    def poll(self) -> int | None:
        """Returns the exit code, or minus the number of the signal that ended the process; None if not (yet) known."""
        self._host.check_connection()
        return self._host.codes.get(self._rank)

    def send_signal(self, number: int) -> None:
        """Sends a signal to the rank and to every process of its session."""
        self._host.send_message(signal=number, rank=self._rank)

    def send_order(self, order: str) -> None:
        """Sends the rank one of the orders that `rank/link.py` carries out, such as "hold"."""
        self._host.send_message(order=order, rank=self._rank)

    def read_remaining_output(self, *channels: str) -> None:
        """Does nothing: the agent passes on all output of a rank before its exit code."""

    def close(self) -> None:
        """Does nothing: the connection is closed once for all ranks of the host."""


def _agent_command() -> str:
    path = environment.read_variable("PYTHONPATH")
    python_path = f"PYTHONPATH={shlex.quote(path)} " if path else ""
    agent = f"{python_path}exec {shlex.join(module_command('npu_run.remote.host_agent'))}"
    # Ends the last line that the remote shell printed as it started.
    return f"echo; cd {shlex.quote(os.getcwd())} && {agent}"


def _is_local_variable(name: str) -> bool:
    return name in _LOCAL_VARIABLES or name.startswith(_LOCAL_PREFIXES)
