"""Gives child processes that a script starts as `python3` the script's Python and the same TensorFlow.

For example, a script can prepare its data by `os.system("python3 data.py &")`. `redirect_python3` puts a `python3` that
runs this module first on `PATH`. The module gives TensorFlow 1.15 to files and modules (`-m`) of the user's tree and to
code of `-c`; all other files run in plain Python.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import re
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
_FLAG = re.compile(r"-[BEIOPSbdqsuv]+|-[WX].*")


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
    """Runs the file, module or code on the command line (`sys.argv`), which begins with the user's folders and `--`."""
    end = sys.argv.index("--")
    roots, arguments = sys.argv[1:end], sys.argv[end + 1 :]
    flags, given = _split_flags(arguments)
    is_code = given[:1] == ["-c"] and len(given) > 1
    path, package = _find_user_file(given, SourceTree(roots))
    if not (is_code or path):
        os.execv(sys.executable, [sys.executable, *arguments])
    if flags:  # a new Python, since this one has started without them
        os.execv(sys.executable, [sys.executable, *flags, *module_command(__name__, *roots, "--", *given)[1:]])
    is_module = given[0] == "-m"
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv = ["-c", *given[2:]] if is_code else [os.path.abspath(path), *given[2:]] if is_module else given
    sys.path.insert(0, "" if is_code else os.getcwd() if is_module else os.path.dirname(os.path.realpath(path)))
    journal.stop_printing()  # the parent has printed it
    start.prepare_process(roots, sys.path[1:])
    if is_code:
        code = compile_source(given[1].encode(), "<string>")
        prepare_namespace(main.__dict__)
        exec(code, main.__dict__)
    else:
        main.__file__ = os.path.abspath(path)
        if package:
            importlib.import_module(package)
            main.__package__ = package
        spawn.run_file(path, main.__dict__)
    _wait_for_threads()


def _split_flags(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Returns the options of Python before the file, and the rest: (["-W", "ignore"], ["data.py", "7"])."""
    count = 0
    while count < len(arguments) and _FLAG.fullmatch(arguments[count]):
        count += 2 if arguments[count] in ("-W", "-X") else 1
    return arguments[:count], arguments[count:]


def _find_user_file(given: list[str], tree: SourceTree) -> tuple[str, str]:
    """Returns the file of the user's tree that Python would run, and its package; "" for none."""
    candidates = {given[0]: ""} if given and given[0].endswith(".py") else {}
    if given[:1] == ["-m"] and len(given) > 1:
        at = given[1].replace(".", os.sep)
        candidates = {os.path.join(at, "__main__.py"): given[1], f"{at}.py": given[1].rpartition(".")[0]}
    return next(
        (each for each in candidates.items() if os.path.isfile(each[0]) and tree.contains_file(each[0])), ("", "")
    )


def _wait_for_threads() -> None:
    """Waits for other threads, because executors of Python 3.9 and later accept no work after the main thread ends."""
    from concurrent.futures import thread as executors

    def others() -> list[threading.Thread]:
        # Executor threads wait for work. Other threads can add some meanwhile, so no Python code iterates over them.
        left_out = {threading.main_thread(), *(ref() for ref in executors._threads_queues.keyrefs())}
        return [each for each in threading.enumerate() if not each.daemon and each not in left_out]

    while found := others():
        found[0].join(0.1)  # this can be a thread of an executor that still gets work
