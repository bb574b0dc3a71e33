"""A file per rank with everything the rank printed."""

from __future__ import annotations

import os
import time
from pathlib import Path

from npu_bridge.launch.errors import LaunchError
from npu_bridge.launch.rank_output import last_state

__all__ = ["RankLog"]


class RankLog:
    """`rank_<n>.log` in a folder; a run adds to what earlier runs have left there.

    Args:
      folder: made when missing.
      rank: the rank that prints.
      title: goes into the line above this run's output.
    Raises:
      LaunchError: the file cannot be written.
    """

    def __init__(self, folder: str | os.PathLike, rank: int, title: str):
        path = Path(folder) / f"rank_{rank}.log"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise LaunchError(f"--log-dir {folder} cannot be written ({error}). Name another folder.") from error
        self._file.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {title}\n".encode())
        self._held: dict[str, bytearray] = {}

    def feed(self, stream: str, text: bytes) -> None:
        """Takes what the rank has just printed on one of its streams; writes whole lines."""
        held = self._held.setdefault(stream, bytearray())
        # What is held back is looked at once: a line may be many megabytes long.
        *lines, rest = text.split(b"\n")
        whole = bytearray()
        for line in lines:
            whole += _final(held + line) + b"\n"
            held.clear()
        if whole:
            self._file.write(whole)
        held += rest
        if b"\r" in rest:
            held[:] = last_state(bytes(held))

    def close(self) -> None:
        """Writes what is left and closes the file."""
        for rest in self._held.values():
            if rest:
                self._file.write(_final(rest) + b"\n")
        self._held.clear()
        self._file.close()


def _final(line: bytearray) -> bytes:
    return last_state(bytes(line)).rstrip(b"\r")
