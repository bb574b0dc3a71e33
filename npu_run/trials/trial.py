"""Describes one run of a script for a trial (folder, seed, steps), and starts the run with this description."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from npu_bridge.base.environment import IMPOSED_OPTIONS
from npu_bridge.base.module_command import module_command
from npu_bridge.base.secondary_files import GrowingFile

SEED = 20150  # for scripts that set no seed; an arbitrary number
OUT = "NPU_RUN_OUT"  # the folder of the run, for scripts that choose their own output folder
FOLDER_MARK = "{out}"  # stands for this folder in a script's arguments
# Imposing these options keeps every operator's dtype.
FLOAT32: dict[str, Any] = dict.fromkeys(("precision_mode_v2", "customize_dtypes", "accelerate_train_mode"))
FLOAT32["precision_mode"] = "must_keep_origin_dtype"
_TRIAL = "NPU_RUN_TRIAL"
_CHUNK_BYTES = 1 << 20  # no pipe holds more
_WAIT_SECS = 0.1
_ENDING_SECS = 10.0  # for the end of a script that is stopped, before it is killed


class Trial(NamedTuple):
    """A description of one run of a script.

    Attributes:
      folder: absolute path of the folder for the run's history; "" for no folder. Estimators use this folder as
        `model_dir`, or its sub-folder `model` if the script is ended early.
      seed: added to every seed that the script sets, or to `SEED` if the script sets none; None changes no seed.
      rounding: number of the random draw that rounds initial weights up or down; 0 leaves weights unchanged.
      steps: number of training steps after which the script is ended; 0 for no early end.
      operators: path of a file that will list the operators of the first training step; "" for no list.
      parameters: path of a file for the number of trained parameters; "" for no file.
      record: absolute path of the folder in which the first `steps` steps are recorded; "" for no record.
      tensors: whether to record the results of all operators of the recorded steps, too.
      replay: absolute path of the folder whose recorded steps are replayed; "" for no replay.
    """

    folder: str = ""
    seed: int | None = None
    rounding: int = 0
    steps: int = 0
    operators: str = ""
    parameters: str = ""
    record: str = ""
    tensors: bool = False
    replay: str = ""

    def to_json(self) -> str:
        """Returns the fields as JSON."""
        return json.dumps(self._asdict())


def make_trial_environment(trial: Trial, imposed: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Returns the environment variables that describe a trial to the ranks of `npu-run`.

    Args:
      trial: the run.
      imposed: option values by name, which replace the values in the script.
    """
    told = {_TRIAL: trial.to_json(), OUT: trial.folder}
    return {**told, IMPOSED_OPTIONS: json.dumps(imposed)} if imposed else told


def fill_in_out_folder(arguments: Sequence[str], folder: str) -> list[str]:
    """Returns a script's arguments with every `{out}` replaced by a folder."""
    return [argument.replace(FOLDER_MARK, folder) for argument in arguments]


def run_trial(
    trial: Trial,
    command: Sequence[str],
    imposed: Mapping[str, Any] | None = None,
    log: str | None = None,
    uses_stderr: bool = False,
) -> int:
    """Runs a script as a trial in a new process of `npu-run`, and waits for its end.

    Args:
      trial: the run; its folder is created.
      command: the words after `npu-run`: options, script, arguments.
      imposed: option values by name, which replace the values in the script.
      log: path of a file for all output; None prints the output.
      uses_stderr: whether the standard output of the new `npu-run` goes to standard error.
    Returns:
      The exit code of `npu-run`.
    """
    os.makedirs(trial.folder, exist_ok=True)
    environment = {**os.environ, **make_trial_environment(trial, imposed)}
    whole = module_command("npu_bridge.run", *fill_in_out_folder(command, trial.folder))
    if log is None:
        with _process(whole, env=environment, stdout=sys.stderr if uses_stderr else None) as process:
            return process.wait()
    return _run_with_log(whole, environment, log)


@contextlib.contextmanager
def _process(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen]:
    """Starts a process for a block; if the block ends early, the process is ended first."""
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        except BaseException:
            for end in (process.terminate, process.kill):
                end()
                _wait_for_end(process)
            raise


def _wait_for_end(process: subprocess.Popen) -> None:
    """Waits for the end of a process for some seconds; drops its output, as a full pipe would keep it from ending."""
    limit = time.monotonic() + _ENDING_SECS
    while process.poll() is None and time.monotonic() < limit:
        if process.stdout is None or not process.stdout.read(_CHUNK_BYTES):
            time.sleep(_WAIT_SECS)


def _run_with_log(command: Sequence[str], environment: Mapping[str, str], log: str) -> int:
    """Runs a command and copies its output to a log through a pipe, so that a full disk does not end the script.

    Does not wait for processes that the command leaves behind, which can hold the pipe open.
    """
    file = GrowingFile(log, "the log", gap="--- {count} bytes are not here: {reason}\n")
    file.write(b"")
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with _process(command, env=environment, bufsize=0, **streams) as process:
        os.set_blocking(process.stdout.fileno(), False)
        text, has_ended = None, False
        while text != b"" and not has_ended:
            has_ended = process.poll() is not None
            select.select([process.stdout], [], [], 0.0 if has_ended else _WAIT_SECS)
            text = process.stdout.read(_CHUNK_BYTES)
            if text:
                file.write(text)
        file.close()
        return process.wait()


def pop_trial() -> Trial | None:
    """Returns the trial that a rank must run, or None; removes the trial from the environment of child processes."""
    text = os.environ.pop(_TRIAL, None)
    return None if text is None else Trial(**json.loads(text))
