"""Runs every rank; the words of its command line are `[--link FD] [--devices N,N,...] script.py args...`.

Sets the rank variables that scripts read, then runs the script as `python script.py args...` does: as `__main__`, with
its own `sys.argv`, and with its folder first on `sys.path`. A script for TensorFlow 1 sees TensorFlow 1.15
(`tensorflow1_compat`). This module does not import TensorFlow.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.machinery
import io
import os
import signal
import sys
import types
from collections.abc import Iterator
from typing import Callable

from npu_bridge.base.after_import import call_after_import, call_when_loaded
from npu_bridge.base.environment import (
    DEVICE_VARIABLES,
    VISIBLE_GPUS,
    Placement,
    declared_device,
    fill_rank_variables,
    launcher_placement,
    launcher_settings,
    write_variable,
)
from npu_bridge.base.gpus import describe_gpu_shortage, gpu_of_rank
from npu_bridge.base.terminal import echo
from npu_bridge.collective.engines import tensorflow_server
from npu_run.rank.input_end import watch_input
from npu_run.rank.link import RankLink
from npu_run.rank.report import describe_exception
from npu_run.rank.trace import format_traceback, script_frames
from npu_run.tensorflow_choice import TensorFlowChoice, take_choice_from_environment
from npu_run.timeline import pop_recording_from_environment, record_training
from npu_run.trials.start import begin_trial
from npu_run.trials.trial import pop_trial

_ALONE = Placement(rank=0, size=1, local_rank=0, local_size=1)
# Packages that this package needs, and whose names people give to their scripts.
_HIDEABLE = ("horovod", "keras", "npu_bridge", "npu_run", "numpy", "tensorflow", "tf_keras")
_INTERRUPTED = 128 + signal.SIGINT


def main(arguments: list[str] | None = None) -> None:
    """Runs the script named in `arguments`, by default the words of the command line."""
    link, process = None, os.getpid()
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[0] == "--link":
        link = RankLink(int(arguments[1]))
        arguments = arguments[2:]
    place = launcher_placement() or _ALONE
    if arguments[0] == "--devices":
        _set_device(arguments[1].split(",")[place.rank])
        arguments = arguments[2:]
    script, path = arguments[0], os.path.abspath(arguments[0])  # kept: a script can change its folder
    fill_rank_variables(place)
    _show_only_own_gpu(place, script)
    report_exit = watch_input(link.send) if link is not None and place.size > 1 else None
    if "tensorflow" not in sys.modules:
        call_after_import(
            "tensorflow", lambda module: None, functools.partial(_without_garbage_collection, link is not None)
        )
    if place.rank == 0 and place.size > 1:
        call_when_loaded("tensorflow", _watch_updates)
    recording = pop_recording_from_environment()
    if recording is not None:
        record_training(recording, place.rank)
    trial = pop_trial()
    end_trial = begin_trial(trial, place.rank) if trial is not None else None
    choice = take_choice_from_environment()
    try:
        tensorflow_server.announce_server_if_needed()
        _run_script(script, arguments, choice, place.rank)
        _report_finish(process, link, report_exit)
    except SystemExit as stop:
        if stop.code not in (None, 0):
            _report_error(link, stop, script, stop.code & 0xFF if isinstance(stop.code, int) else 1)
        else:
            _report_finish(process, link, report_exit)
        raise
    except KeyboardInterrupt as interrupt:
        # One rank's stack is enough to show where an interrupted job was.
        if place.rank == 0:
            _print_exception(interrupt, script)
        sys.exit(_INTERRUPTED)
    except BaseException as error:
        _report_error(link, error, script, 1)
        # The launcher shows the traceback of the first rank to fail, and one line about the others.
        if link is None or sys.excepthook is not sys.__excepthook__ or os.getpid() != process:
            _print_exception(error, script)
        sys.exit(1)
    finally:
        if os.getpid() == process:
            if end_trial is not None:
                end_trial()
            choice.write_report(script, path, place.rank)


def _warn_about_unread_settings() -> None:
    """Warns about `--set` options that the script, now finished, has never read."""
    if launcher_settings():
        from npu_bridge.options.from_shell import report_unread_settings

        report_unread_settings()


@contextlib.contextmanager
def _without_garbage_collection(is_sampled: bool) -> Iterator[None]:
    """Switches garbage collection off while TensorFlow is loaded, which saves 0.4 s: the loaded objects all stay.

    Args:
      is_sampled: whether the link to the launcher samples the main thread's frames.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        if is_sampled:
            # Frozen garbage is never freed, and can hold sampled frames with all the objects of the script.
            gc.collect()
        gc.freeze()  # later collections leave these objects out
    finally:
        if was_enabled:
            gc.enable()


def _watch_updates(tensorflow: types.ModuleType) -> None:
    """Watches updates of Keras optimizers. This loads npu_bridge before the script imports it."""
    with contextlib.suppress(ImportError):  # an unsupported TensorFlow
        from npu_bridge.collective.checks.exchanges import watch_updates

        watch_updates()


def _set_device(device: str) -> None:
    """Overwrites the environment variables of the device with the device from the rank table."""
    for name in DEVICE_VARIABLES:
        write_variable(name, device)


def _show_only_own_gpu(place: Placement, script: str) -> None:
    """Makes only this rank's GPU visible, so that children and other libraries use no other rank's GPU."""
    gpu = gpu_of_rank(declared_device(), place.local_size, script)
    if gpu is not None:
        write_variable(VISIBLE_GPUS, gpu)
    elif place.local_rank == 0 and (text := describe_gpu_shortage(place.local_size)):
        echo(f"npu-run: {text}", err=True)


def _run_script(script: str, arguments: list[str], choice: TensorFlowChoice, rank: int) -> None:
    """Executes a file as `__main__`; the module stays in `sys.modules`, as threads and pickles use it until the end."""
    module = types.ModuleType("__main__")
    module.__file__ = os.path.abspath(script)
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", module.__file__)
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    sys.argv = list(arguments)  # the script can change it
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
    for name in _HIDEABLE if rank == 0 else ():
        if os.path.isfile(os.path.join(sys.path[0], f"{name}.py")):
            echo(f"npu-run: {name}.py beside the script hides the package {name}. Rename that file.", err=True)
    if choice.apply_to_script(script, rank):
        from tensorflow1_compat.source import compile_source, prepare_namespace

        prepare_namespace(module.__dict__)
    else:
        compile_source = functools.partial(compile, mode="exec", dont_inherit=True)
    with io.open_code(script) as file:
        code = compile_source(file.read(), script)
    exec(code, module.__dict__)


def _report_error(link: RankLink | None, error: BaseException, script: str, code: int) -> None:
    """Reports to the launcher how and when this rank ends; called before other code can fail."""
    if link is not None:
        facts = describe_exception(error, script, code)
        # A rank that enters a collective after Horovod was shut down finds it not initialized.
        facts["secondary"] |= link.has_left_horovod
        link.send({"ending": facts})


def _report_finish(process: int, link: RankLink | None, report_exit: Callable[[], None] | None) -> None:
    """Reports to the launcher that the script has finished; exit code 0 alone does not prove this.

    Does nothing in a process that the script has forked, where the sessions of the rank would wait for ever.
    """
    if os.getpid() != process:
        return
    _warn_about_unread_settings()
    if report_exit is not None:
        report_exit()
    if link is not None:
        link.send({"finished": True})


def _print_exception(error: BaseException, script: str) -> None:
    """Prints an exception in short form, or through the script's own excepthook."""
    if sys.excepthook is not sys.__excepthook__:
        frames = script_frames(error, script)
        sys.excepthook(type(error), error.with_traceback(frames), frames)
    else:
        echo(format_traceback(error, script).rstrip("\n"), err=True)
