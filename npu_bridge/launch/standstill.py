"""Whether the script of a rank stands still, and where: a look at its main thread now and then.

Horovod 0.28 has a stall check, but over Gloo it never speaks: it goes through a list of ranks that only the MPI
controller fills. So a rank watches itself. A call that has not returned between two looks is the same frame object at
the same instruction; a new call of the same function is another object, because the last one seen is kept alive.
"""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import types
from typing import Any

__all__ = ["Standstill"]

# Shorter standstills are everyday life and not told to anybody.
_NOTICE_SECS = 2.0
_RUNTIMES = ("tensorflow", "horovod", "keras", "tensorflow_estimator")
_INSTALLED = tuple({os.path.join(path, "") for path in sysconfig.get_paths().values()})
_CODE_CHARACTERS = 60


class Standstill:
    """What one thread has been doing since it last moved.

    Args:
      thread: identifier of the thread, as in `threading.get_ident()`.
    """

    def __init__(self, thread: int):
        self._thread = thread
        self._frame: types.FrameType | None = None
        self._instruction = -1
        self._since = 0.0
        self._is_told = False

    def look(self, now: float) -> dict[str, Any] | None:
        """Looks at the thread; to be called about once a second.

        Args:
          now: seconds on the monotonic clock.
        Returns:
          News for the launcher: `{"still": {"since", "where", "waits"}}` once the thread has not moved for a while,
          `{"still": None}` when it moves again after that, None when there is nothing new. `waits` says that it is
          inside TensorFlow or Horovod.
        """
        frame = sys._current_frames().get(self._thread)
        if frame is None:
            return None
        if frame is self._frame and frame.f_lasti == self._instruction:
            if self._is_told or now - self._since < _NOTICE_SECS:
                return None
            self._is_told = True
            waits = str(frame.f_globals.get("__name__", "")).partition(".")[0] in _RUNTIMES
            return {"still": {"since": self._since, "where": _place(frame), "waits": waits}}
        was_told, self._is_told = self._is_told, False
        self._frame, self._instruction, self._since = frame, frame.f_lasti, now
        return {"still": None} if was_told else None


def _place(innermost: types.FrameType) -> str:
    """File, line and text of the innermost line that is not of an installed package, if there is one."""
    frame: types.FrameType | None = innermost
    while frame is not None and frame.f_code.co_filename.startswith((*_INSTALLED, "<")):
        frame = frame.f_back
    frame = frame or innermost
    file, line = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(file, line).strip()
    text = text if len(text) <= _CODE_CHARACTERS else f"{text[:_CODE_CHARACTERS]}..."
    return f"{os.path.basename(file)}:{line}" + (f" ({text})" if text else "")
