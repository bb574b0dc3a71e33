"""Describes one run of a script for a trial: folder, seed, steps; runs it, and hands the description to the ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from npu_bridge.base.environment import IMPOSED_OPTIONS
from npu_bridge.base.secondary_files import GrowingFile

SEED = 20150  # for scripts that set none; any number would do (ours)
OUT = "NPU_RUN_OUT"  # the folder of the run, for scripts that choose their own output folder
FOLDER_MARK = "{out}"  # stands for this folder in a script's arguments
# Imposing these options keeps every operator's dtype.
FLOAT32: dict[str, Any] = dict.fromkeys(("precision_mode_v2", "customize_dtypes", "accelerate_train_mode"))
FLOAT32["precision_mode"] = "must_keep_origin_dtype"
_TRIAL = "NPU_RUN_TRIAL"
_CHUNK_BYTES = 65536


class Trial(NamedTuple):
    """One run of a script.

    Attributes:
      folder: absolute path of the folder for its history, which Estimators take as their `model_dir` (`model` in it,
        if the script is ended early); "" for no folder.
      seed: added to every seed the script sets, or to `SEED` if it sets none; None leaves seeds alone.
      rounding: number of the draw by which initial weights are changed by one rounding; 0 for none.
      steps: training steps after which the script is ended; 0 for never.
      operators: path of a file to list the operators of the first training step in; "" for none.
      parameters: path of a file for the number of trained parameters; "" for none.
      record: absolute path of the folder to record the first `steps` steps in; "" for none.
      tensors: whether to record what the operators of these steps compute, too.
      replay: absolute path of the folder to feed recorded steps from; "" for none.
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

    def as_text(self) -> str:
        """Returns the fields as JSON."""
        return json.dumps(self._asdict())


def variables_of(trial: Trial, imposed: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Returns the environment variables that describe a trial to the ranks of `npu-run`.

    Args:
      trial: the run.
      imposed: option values by name, which replace the script's.
    """
    told = {_TRIAL: trial.as_text(), OUT: trial.folder}
    return {**told, IMPOSED_OPTIONS: json.dumps(imposed)} if imposed else told


def arguments_in(arguments: Sequence[str], folder: str) -> list[str]:
    """Returns a script's arguments with every `{out}` replaced by a folder."""
    return [argument.replace(FOLDER_MARK, folder) for argument in arguments]


def run_trial(
    trial: Trial,
    command: Sequence[str],
    imposed: Mapping[str, Any] | None = None,
    log: str | None = None,
    is_aside: bool = False,
) -> int:
    """Runs a script as a trial through a new `npu-run`, and waits for its end.

    Args:
      trial: the run; its folder is created.
      command: the words after `npu-run`: options, script, arguments.
      imposed: see `variables_of`.
      log: path of a file for all output; None for this process's own output.
      is_aside: whether its standard output goes to standard error.
    Returns:
      The exit code of `npu-run`.
    """
    os.makedirs(trial.folder, exist_ok=True)
    environment = {**os.environ, **variables_of(trial, imposed)}
    whole = [sys.executable, "-m", "npu_bridge.run", *arguments_in(command, trial.folder)]
    if log is None:
        return subprocess.run(whole, env=environment, stdout=sys.stderr if is_aside else None, check=False).returncode
    return _run_with_log(whole, environment, log)


def _run_with_log(command: Sequence[str], environment: Mapping[str, str], log: str) -> int:
    """Runs a command whose output goes to a log through a pipe: a full disk must not end the script."""
    file = GrowingFile(log, "the log", gap="--- {count} bytes are not here: {reason}\n")
    file.write(b"")
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, env=environment, bufsize=0, **streams) as process:
        while text := process.stdout.read(_CHUNK_BYTES):
            file.write(text)
        file.close()
        return process.wait()


def take_trial() -> Trial | None:
    """Returns the trial that a rank must run, or None, and hides it from processes that the rank starts."""
    text = os.environ.pop(_TRIAL, None)
    return None if text is None else Trial(**json.loads(text))
