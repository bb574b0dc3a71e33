"""Runs small scripts as trials: what `npu-run` tells a rank, in a process that has loaded TensorFlow already."""

from __future__ import annotations

import json
import os
import pathlib

from npu_run.trials.trial import fill_in_out_folder, make_trial_environment
from tests.npu_run.launching import write_script

RANK = "import sys\nfrom npu_run.rank.main import main\nmain(sys.argv[1:])\n"


class WarmTrials:
    """Makes `run_trial` of a module start ranks from a warm Python; the rest of a command is what users run.

    Args:
      python: a `WarmPython`.
      folder: where commands are given, and for the file that starts a rank.
    """

    def __init__(self, python, folder: pathlib.Path):
        self._python, self._folder = python, folder
        self._start = write_script(folder, RANK, "start_rank.py")
        self.runs = 0

    def run(self, trial, command, imposed=None, log=None, uses_stderr=False) -> int:
        self.runs += 1
        os.makedirs(trial.folder, exist_ok=True)
        env = {**os.environ, **make_trial_environment(trial, imposed)}
        ended = self._python.run([self._start, *fill_in_out_folder(command, trial.folder)], cwd=self._folder, env=env)
        if log is not None:
            pathlib.Path(log).write_text(ended.stdout + ended.stderr)
        self.printed = ended.stdout + ended.stderr
        return ended.returncode


def losses_in(folder) -> list:
    lines = (pathlib.Path(folder) / "history.jsonl").read_text().splitlines()
    return [row["loss"] for row in map(json.loads, lines) if "loss" in row]
