"""What every rank executes: `python -m npu_bridge.launch.rank_main [--link FD] script.py args...`.

Fills in the rank variables that scripts read, then runs the script the way `python script.py args...` does:
as `__main__`, with its own `sys.argv` and its folder first on `sys.path`. TensorFlow is not imported here.

The link is one end of a socket pair whose other end only the launcher holds. Through it the rank reports the
exception that ends it; and when the launcher dies, however it dies, the link closes and the rank ends itself.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import io
import json
import os
import signal
import sys
import threading
import time
import traceback
import types
from typing import Any

from npu_bridge.options.environment import Launched, fill_rank_variables, launched

__all__ = ["main"]

_ALONE = Launched(rank=0, size=1, local_rank=0, local_size=1)
_INTERRUPTED = 128 + signal.SIGINT
# A report fits into the link's buffer, so that sending it never waits for the launcher.
_TRACE_CHARACTERS = 16_000
# How Horovod words, on the ranks that are left, that some other rank is gone (0.28, Gloo).
_ECHOES = (
    "HorovodInternalError",
    "Horovod has been shut down",
    "Connection closed by peer",
    "Connection reset by peer",
    "gloo/transport/tcp",
)


def main(arguments: list[str]) -> None:
    """Runs the script named in `arguments` (everything after the module name on the command line)."""
    link = None
    if arguments[0] == "--link":
        link = int(arguments[1])
        arguments = arguments[2:]
        os.set_inheritable(link, False)
        threading.Thread(target=_end_with_launcher, args=(link,), name="npu-run link", daemon=True).start()
    place = launched() or _ALONE
    fill_rank_variables(place)
    try:
        _run_script(arguments[0], arguments)
    except SystemExit as stop:
        if stop.code not in (None, 0):
            code = stop.code & 0xFF if isinstance(stop.code, int) else 1
            _report(link, stop, arguments[0], summary=f"sys.exit({stop.code!r})", code=code)
        raise
    except KeyboardInterrupt as interrupt:
        # One stack is enough to see where an interrupted job was.
        if place.rank == 0:
            _show(interrupt, arguments[0])
        sys.exit(_INTERRUPTED)
    except BaseException as error:
        summary = traceback.format_exception_only(type(error), error)[-1].strip()
        _report(link, error, arguments[0], summary=summary, code=1)
        _show(error, arguments[0])
        sys.exit(1)


def _run_script(script: str, arguments: list[str]) -> None:
    """Executes a file as `__main__`, which it stays: threads and pickles may look it up to the very end."""
    with io.open_code(script) as file:
        source = file.read()
    module = types.ModuleType("__main__")
    module.__file__ = os.path.abspath(script)
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", module.__file__)
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    sys.argv = arguments
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    exec(compile(source, script, "exec", dont_inherit=True), module.__dict__)


def _end_with_launcher(link: int) -> None:
    """Waits until the launcher's end of the link closes, then kills this rank and what it started."""
    while os.read(link, 1):
        pass
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _report(link: int | None, error: BaseException, script: str, **facts: Any) -> None:
    """Tells the launcher, before anything else can go wrong, how this rank ends and when."""
    if link is None:
        return
    # Where the launcher is gone, the thread that watches the link ends this process.
    with contextlib.suppress(OSError):
        facts.update(when=time.monotonic(), echo=_is_echo(error), trace=_trace(error, script))
        os.write(link, json.dumps(facts).encode())


def _is_echo(error: BaseException) -> bool:
    """Whether an error only says that another rank is gone, itself or anywhere among its causes."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        seen.append(cause)
        names = " ".join(base.__name__ for base in type(cause).__mro__)
        if any(echo in f"{names} {cause}" for echo in _ECHOES):
            return True
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return False


def _trace(error: BaseException, script: str) -> str:
    frames = _script_frames(error, script)
    return "".join(traceback.format_exception(type(error), error, frames))[-_TRACE_CHARACTERS:]


def _show(error: BaseException, script: str) -> None:
    """Prints the exception the way Python would have, or the way the script has asked for."""
    frames = _script_frames(error, script)
    sys.excepthook(type(error), error.with_traceback(frames), frames)


def _script_frames(error: BaseException, script: str) -> types.TracebackType | None:
    """The traceback from the script's first line on, without the frames of this module."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename != script:
        frame = frame.tb_next
    return frame


if __name__ == "__main__":
    main(sys.argv[1:])
