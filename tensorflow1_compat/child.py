"""Gives child processes that a script starts as `python3` the script's Python and the same TensorFlow.

For example, a script can prepare its data by `os.system("python3 data.py &")`. `redirect_python3` puts a `python3` that
runs this module first on `PATH`. The module gives TensorFlow 1.15 to files of the user's tree and to code of `-c`; all
other files run in plain Python.
"""

from __future__ import annotations

import atexit
import functools
import os
import shlex
import sys
import threading
import types
from collections.abc import Sequence

from npu_bridge.base.environment import probable_rank, read_variable, write_variable
from npu_bridge.base.files import temporary_folder
from npu_bridge.base.module_command import module_command
from npu_bridge.base.secondary_files import NonFatalOutput
from tensorflow1_compat import journal, spawn, start
from tensorflow1_compat.source import compile_source, prepare_namespace
from tensorflow1_compat.tree import SourceTree

__all__ = ["redirect_python3"]

_NAMES = ("python", "python3", "python3.7")


def redirect_python3(roots: Sequence[str]) -> None:
    """Gives TensorFlow 1.15 to the user's files in every child process that this rank starts as `python3`.

    If the files for this cannot be written, the script runs without them, because few scripts start Python processes.

    Args:
      roots: folders of the user's source files.
    """
    say = None if probable_rank() == 0 else lambda text: None
    NonFatalOutput("the python3 for processes of this script", say=say).attempt(_put_first_on_path, roots)


def _put_first_on_path(roots: Sequence[str]) -> None:
    own = temporary_folder("npu_run_python_")
    atexit.register(own.cleanup)
    folder = own.name
    command = os.fsencode(shlex.join(module_command(__name__, *roots, "--")))  # file names can hold any bytes
    for name in _NAMES:
        with open(os.path.join(folder, name), "wb", opener=functools.partial(os.open, mode=0o755)) as file:
            file.write(b'#!/bin/sh\nexec %b "$@"\n' % command)
    write_variable("PATH", folder + os.pathsep + (read_variable("PATH") or os.defpath))


def main() -> None:
    """Runs the file or the code on the command line (`sys.argv`), which begins with the user's folders and `--`."""
    end = sys.argv.index("--")
    roots, arguments = sys.argv[1:end], sys.argv[end + 1 :]
    given = arguments[arguments[:1] == ["-u"] :]
    is_code = given[:1] == ["-c"] and len(given) > 1
    is_file = given[:1] != [] and given[0].endswith(".py") and SourceTree(roots).contains_file(given[0])
    if not (is_code or is_file and os.path.isfile(given[0])):
        os.execv(sys.executable, [sys.executable, *arguments])
    if given != arguments:
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv = ["-c", *given[2:]] if is_code else given
    sys.path.insert(0, "" if is_code else os.path.dirname(os.path.realpath(given[0])))
    journal.stop_printing()  # the parent has printed it
    start.prepare_process(roots, sys.path[1:])
    if is_code:
        code = compile_source(given[1].encode(), "<string>")
        prepare_namespace(main.__dict__)
        exec(code, main.__dict__)
    else:
        main.__file__ = os.path.abspath(given[0])
        spawn.run_file(given[0], main.__dict__)
    _wait_for_threads()


def _wait_for_threads() -> None:
    """Waits for other threads, because executors of Python 3.9 and later accept no work after the main thread ends."""
    from concurrent.futures import thread as executors

    def others() -> list[threading.Thread]:
        # Executor threads wait for work. Other threads can add some meanwhile, so no Python code iterates over them.
        left_out = {threading.main_thread(), *(ref() for ref in executors._threads_queues.keyrefs())}
        return [each for each in threading.enumerate() if not each.daemon and each not in left_out]

    while found := others():
        found[0].join(0.1)  # this can be a thread of an executor that still gets work
