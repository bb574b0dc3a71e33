"""What `npu-run` starts on every other host, through ssh: it runs the ranks of that host and passes on what they say.

It reads lines of JSON from its input: first the job, then signals for ranks and signs of life. It writes lines of JSON
to its output: what ranks print and report, how they end, and signs of life of its own. The connection is its licence:
when it closes, or nothing has come through it for a while, the ranks are killed. So a host that is cut off cleans up
by itself, and so it does when the launcher dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

from npu_bridge.launch.host_address import address_towards, interface_of
from npu_bridge.launch.rank_environment import rank_defaults
from npu_bridge.launch.rank_process import is_stopped, rank_command, signal_group

__all__ = ["LIFE_SIGN_SECS", "main"]

LIFE_SIGN_SECS = 1.0
_TICK_SECS = 0.05
_CHUNK_BYTES = 16384


def main() -> None:
    """Runs the ranks of one host until the connection closes."""
    messages = _messages()
    job = next(messages, None)
    if job is None:
        return
    ranks = [_KeptRank(place, job) for place in job["ranks"]]
    threading.Thread(target=_obey, args=(messages, ranks), daemon=True).start()
    with contextlib.suppress(BrokenPipeError):
        _watch(ranks)
    _end(ranks)


class _KeptRank:
    """A rank's process with its three channels, not understood, only passed on."""

    def __init__(self, place: dict[str, Any], job: dict[str, Any]):
        self.rank: int = place["rank"]
        self._link, rank_end = socket.socketpair()
        with rank_end:
            self._process = subprocess.Popen(
                rank_command(job["script"], job["arguments"], job["devices"], rank_end.fileno()),
                env={**_environment(job), **place["variables"]},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                pass_fds=(rank_end.fileno(),),
            )
        # From here on descriptors are all that is needed of them.
        files = [os.dup(pipe.fileno()) for pipe in (self._process.stdout, self._process.stderr)]
        self._process.stdout.close()
        self._process.stderr.close()
        self.channels = dict(zip([*files, self._link.detach()], ["stdout", "stderr", "link"]))
        for file in self.channels:
            os.set_blocking(file, False)
        self.code: int | None = None

    @property
    def is_stopped(self) -> bool:
        return self.code is None and is_stopped(self._process.pid)

    def take(self, file: int) -> bool:
        """Passes on what has come through a channel; False when nothing is there."""
        try:
            text = os.read(file, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            text = b""
        if text:
            _tell(rank=self.rank, channel=self.channels[file], text=text.decode("latin-1"))
        else:
            del self.channels[file]
            os.close(file)
        return bool(text)

    def notice_end(self) -> None:
        """Tells the exit code once the process has ended, after everything it has said."""
        if self.code is None and self._process.poll() is not None:
            for file in list(self.channels):
                while self.take(file):
                    pass
            self.code = self._process.returncode
            _tell(rank=self.rank, code=self.code)

    def send_signal(self, number: int) -> None:
        signal_group(self._process.pid, number)

    def leave_horovod(self) -> None:
        for file, channel in list(self.channels.items()):
            if channel == "link":
                with contextlib.suppress(OSError):
                    os.write(file, b"x")


def _watch(ranks: list[_KeptRank]) -> None:
    """Passes on what ranks say and how they end, for ever; the thread that listens ends the process."""
    selector = selectors.DefaultSelector()
    for rank in ranks:
        for file in rank.channels:
            selector.register(file, selectors.EVENT_READ, rank)
    told_at = 0.0
    while True:
        for key, _ in selector.select(_TICK_SECS):
            key.data.take(key.fd)
        for rank in ranks:
            rank.notice_end()
        _unregister_closed(selector)
        if time.monotonic() - told_at >= LIFE_SIGN_SECS:
            told_at = time.monotonic()
            _tell(stopped=[rank.rank for rank in ranks if rank.is_stopped])


def _unregister_closed(selector: selectors.BaseSelector) -> None:
    for key in list(selector.get_map().values()):
        if key.fd not in key.data.channels:
            selector.unregister(key.fd)


def _obey(messages: Iterator[dict[str, Any]], ranks: list[_KeptRank]) -> None:
    """Does what the launcher says; once it says nothing more, kills the ranks and ends this process."""
    by_number = {rank.rank: rank for rank in ranks}
    for message in messages:
        if "signal" in message:
            by_number[message["rank"]].send_signal(message["signal"])
        elif "leave" in message:
            by_number[message["leave"]].leave_horovod()
    _end(ranks)
    os._exit(0)


def _end(ranks: list[_KeptRank]) -> None:
    """Kills what still runs; what ranks that have all ended by themselves left behind is theirs."""
    if any(rank.code is None for rank in ranks):
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)


def _messages() -> Iterator[dict[str, Any]]:
    """What the launcher says, to the end of the connection or to a silence longer than the job allows."""
    unread, silence_secs = b"", None
    while select.select([0], [], [], silence_secs)[0]:
        text = os.read(0, _CHUNK_BYTES)
        if not text:
            return
        *lines, unread = (unread + text).split(b"\n")
        for message in map(json.loads, lines):
            silence_secs = message.get("silence_secs", silence_secs)
            yield message


def _tell(**event: Any) -> None:
    """Writes one line; the clock goes with it, for what ranks report with times of their own."""
    line = json.dumps({**event, "now": time.monotonic()}).encode() + b"\n"
    while line:
        line = line[os.write(1, line) :]


def _environment(job: dict[str, Any]) -> dict[str, str]:
    """All that the launcher's environment holds, over what ssh gives, over our defaults."""
    variables = {**rank_defaults(len(job["ranks"])), **os.environ, **job["environment"]}
    interface = interface_of(address_towards(job["peer"]))
    if interface:
        variables.setdefault("HOROVOD_GLOO_IFACE", interface)
        variables.setdefault("NCCL_SOCKET_IFNAME", interface)
    return variables


if __name__ == "__main__":
    main()
