"""A file per rank with everything the rank printed."""

from __future__ import annotations

import os
import time
from pathlib import Path

from npu_bridge.launch.errors import LaunchError

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
        self._held: dict[str, bytes] = {}

    def feed(self, stream: str, text: bytes) -> None:
        """Takes what the rank has just printed on one of its streams; writes whole lines."""
        *lines, rest = (self._held.get(stream, b"") + text).split(b"\n")
        if lines:
            self._file.write(b"".join(_final(line) + b"\n" for line in lines))
        # Of a line that is drawn over and over, only the last state is worth keeping.
        self._held[stream] = _final(rest)

    def close(self) -> None:
        """Writes what is left and closes the file."""
        for rest in self._held.values():
            if rest:
                self._file.write(rest + b"\n")
        self._held.clear()
        self._file.close()


def _final(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]
