"""Writes secondary files: logs, reports, pictures, records, numbers. Training continues if a write fails.

One line reports the failure and its reason; another line reports the first write that works again. Checkpoints are not
secondary: a training that cannot save its state ends.
"""

from __future__ import annotations

import collections
import contextlib
import os
import time
from typing import Any, Callable

from npu_bridge.base.files import make_local_folder
from npu_bridge.base.terminal import escape_in_line, logger

_LOG = logger(__name__)
# Writes pause for one second after the first failure, two seconds after the next one, and so on. A nearly full disk
# refuses only some writes; neither log lines about them nor a slow network disk must delay a training.
_PAUSE_SECS, _LONGEST_PAUSE_SECS = 1.0, 60.0
_KEPT_BYTES = 1 << 20


def describe_failure(error: BaseException) -> str:
    """Returns why a write failed, in one line."""
    text = getattr(error, "strerror", None) or next(iter(str(error).splitlines()), "") or type(error).__name__
    return escape_in_line(text)


class NonFatalOutput:
    """A file or group of files written beside a training.

    Args:
      what: the name of the file in log lines, such as "the log logs/rank_0.log".
      failures: exception classes besides `OSError` that mean a failed write.
      say: prints a line; None logs a warning.
      clock: returns seconds that never decrease.
    Attributes:
      is_stopped: whether the last attempt failed.
      reason: why the last failed attempt failed.
    """

    def __init__(
        self,
        what: str,
        failures: tuple[type[BaseException], ...] = (),
        say: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.what = escape_in_line(what)
        self.is_stopped = False
        self.reason = ""
        self._failures = (OSError, *failures)
        self._say = _LOG.warning if say is None else say
        self._clock = clock
        self._pause_secs = _PAUSE_SECS
        self._next_try = 0.0

    def attempt(self, action: Callable[..., Any], *arguments: Any, is_last_chance: bool = False) -> bool:
        """Calls `action`, which writes; returns whether `action` was called and succeeded.

        Args:
          is_last_chance: also try during the pause after a failure, because there is no later chance.
        """
        if self.is_stopped and not is_last_chance and self._clock() < self._next_try:
            return False
        try:
            action(*arguments)
        except self._failures as error:
            self._note_failure(error)
            return False
        if self.is_stopped:
            self.is_stopped = False
            self._say(f"{self.what} is written again")
        return True

    def _note_failure(self, error: BaseException) -> None:
        self._next_try = self._clock() + self._pause_secs
        self._pause_secs = min(2 * self._pause_secs, _LONGEST_PAUSE_SECS)
        if self.is_stopped:
            return
        self.is_stopped, self.reason = True, describe_failure(error)
        self._say(f"{self.what} is not written any more: {self.reason}; the rest continues without it")


class GrowingFile:
    """A file to which a training appends. After a failed write, at least the latest bytes are kept and written later.

    Args:
      path: the file; its folder is created.
      what: as in `NonFatalOutput`, without the path.
      begin: called once, before the first write, to prepare the file.
      gap: a line that the file gets after lost bytes, with `{count}` and `{reason}`; "" for no line.
      kept_bytes: how many unwritten bytes are kept.
      say, clock: as in `NonFatalOutput`.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        what: str,
        begin: Callable[[], None] | None = None,
        gap: str = "",
        kept_bytes: int | None = None,
        say: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.path = os.fspath(path)
        self.secondary = NonFatalOutput(f"{what} {self.path}", say=say, clock=clock)
        self._begin, self._gap, self._kept_bytes = begin, gap, kept_bytes or _KEPT_BYTES
        self._file: int | None = None
        self._kept: collections.deque[bytes] = collections.deque()
        self._lost = 0

    def open(self) -> None:
        """Prepares the file.

        Raises:
          OSError: the file cannot be written.
        """
        make_local_folder(os.path.dirname(self.path) or ".")
        if self._begin is not None:
            self._begin()
            self._begin = None
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)

    def write(self, text: bytes) -> None:
        """Appends a text, or keeps it for later if the write fails."""
        self._kept.append(text)
        if not self.secondary.attempt(self._write_kept_bytes):
            self._drop_oldest()

    def close(self) -> None:
        """Writes the kept bytes, if possible, and closes the file; a later `write` opens it again."""
        if self._kept or self._begin is not None:
            self.secondary.attempt(self._write_kept_bytes, is_last_chance=True)
        self._kept.clear()
        self._close()

    def _write_kept_bytes(self) -> None:
        if self._file is not None and not os.fstat(self._file).st_nlink:
            self._close()  # the file was removed
        if self._file is None:
            self.open()
        try:
            if self._lost and self._gap:
                _append_whole_text(
                    self._file, self._gap.format(count=self._lost, reason=self.secondary.reason).encode()
                )
            self._lost = 0
            while self._kept:  # one by one: the disk can have room for some of them
                _append_whole_text(self._file, self._kept[0])
                self._kept.popleft()
        except OSError:
            self._close()  # a file system can be gone for good and return under the same name
            raise

    def _drop_oldest(self) -> None:
        """Drops all but the latest unwritten bytes."""
        size = sum(map(len, self._kept))
        while size > self._kept_bytes:
            size -= len(self._kept[0])
            self._lost += len(self._kept.popleft())

    def _close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = None


def _append_whole_text(file: int, text: bytes) -> None:
    """Appends all of a text, or nothing: half a line would spoil the next one."""
    before, written = os.fstat(file).st_size, 0
    try:
        while written < len(text):
            written += os.write(file, text[written:])
    except OSError:
        with contextlib.suppress(OSError):
            if written and os.fstat(file).st_size == before + written:  # no other process has appended anything
                os.ftruncate(file, before)
        raise
