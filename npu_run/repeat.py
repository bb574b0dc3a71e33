"""`npu-run --repeat N --vary WHAT`: runs a script several times with harmless differences, to measure loss noise."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence
from typing import Callable, NamedTuple

from npu_bridge.base.machine import usable_cores
from npu_bridge.base.output_folders import OutputFolder
from npu_bridge.base.terminal import path_for_message
from npu_bridge.reporting.history import HISTORY_FILE, History
from npu_run.errors import LaunchError
from npu_run.outputs import claim_command_output
from npu_run.trials.trial import Trial, fill_in_out_folder, make_trial_environment

WAYS = ("seed", "order", "rounding")
_NOTE = "trial.json"  # in the folder of a run; describes the variation
_ONEDNN = "TF_ENABLE_ONEDNN_OPTS"


class Repeats(NamedTuple):
    """Several runs of one script that differ in one respect.

    Attributes:
      count: number of runs.
      vary: the difference between the runs, one of `WAYS`.
      folder: absolute path; run k writes to its sub-folder `repeat-<k>`.
    """

    count: int
    vary: str
    folder: str

    @property
    def names(self) -> list[str]:
        """Returns the names of the runs' folders."""
        return [os.path.basename(repeat_folder(self.folder, number)) for number in range(self.count)]

    def run(self, arguments: Sequence[str], run: Callable[[list[str]], int], say: Callable[[str], None]) -> int:
        """Runs the script `count` times, one run after another; stops at the first failed run.

        Args:
          arguments: the script's arguments, in which `{out}` is replaced by the folder of the run.
          run: runs the script with a list of arguments, and returns the exit code.
          say: prints a line.
        Returns:
          The exit code of the last run.
        Raises:
          LaunchError: the folder holds anything but repeats, or cannot be written.
        """
        with claim_command_output(self.folder, "--out") as own:
            own.check(*self.names)
            return self._run_in_folder(own, arguments, run, say)

    def _run_in_folder(self, output_folder: OutputFolder, arguments, run, say) -> int:
        before = dict(os.environ)
        for number in range(self.count):
            folder = repeat_folder(self.folder, number)
            trial = Trial(
                folder=folder,
                seed=number if self.vary == "seed" else 0,
                rounding=number if self.vary == "rounding" else 0,
            )
            _prepare_folder(trial, output_folder)
            os.environ.update({**self._changed_variables(number), **make_trial_environment(trial)})
            try:
                say(f"repeat {number}, {self._describe_difference(number)}, in {path_for_message(folder)}")
                code = run(fill_in_out_folder(arguments, folder))
            finally:
                os.environ.clear()
                os.environ.update(before)
            if code:
                return code
        for line in self._summarise():
            say(line)
        return 0

    def _changed_variables(self, number: int) -> dict[str, str]:
        """Returns environment variables that change the order of sums: oneDNN on or off, and threads per operator."""
        if self.vary != "order" or number == 0:
            return {}
        is_off = os.environ.get(_ONEDNN) == "0"
        threads = [usable_cores(), *(n for n in range(1, self.count + 1) if n != usable_cores())][number // 2]
        changed = {_ONEDNN: "1" if is_off else "0"} if number % 2 else {}
        return {**changed, **({"TF_NUM_INTRAOP_THREADS": str(threads)} if number > 1 else {})}

    def _describe_difference(self, number: int) -> str:
        if number == 0:
            return "as it is"
        if self.vary == "order":
            return ", ".join(f"{name}={text}" for name, text in self._changed_variables(number).items())
        return f"seeds + {number}" if self.vary == "seed" else f"initial weights rounded otherwise (draw {number})"

    def _summarise(self) -> list[str]:
        shown = path_for_message(self.folder)
        runs = [History(os.path.join(repeat_folder(self.folder, k), HISTORY_FILE)).rows for k in range(self.count)]
        if not all(runs):
            return [
                "repeats: no losses were seen. Expected a script that trains through sessions, an Estimator or "
                "model.fit; write history.jsonl to the folder in NPU_RUN_OUT yourself."
            ]
        lines = []
        late = [number for number, rows in enumerate(runs) if rows[0].step > runs[0][0].step]
        if late:
            lines.append(
                f"repeats: repeat {late[0]} began at step {runs[late[0]][0].step}, repeat 0 at {runs[0][0].step}: it "
                f"resumed from a checkpoint of an earlier repeat. Give the script a separate folder for each repeat: "
                f"write {{out}} in its arguments, or read NPU_RUN_OUT."
            )
        losses = [[row.loss for row in rows] for rows in runs]
        last = [values[-1] for values in losses if values[-1] is not None and math.isfinite(values[-1])]
        spread = f"{statistics.mean(last):.6g} +- {statistics.stdev(last):.2g}" if len(last) > 1 else "unknown"
        lines.append(f"repeats: {self.count} runs of {len(runs[0])} steps; the last loss is {spread} ({shown})")
        same = [number for number, values in enumerate(losses[1:], 1) if values == losses[0]]
        if same:
            lines.append(
                f"repeats: --vary {self.vary} changed no loss of repeat {', '.join(map(str, same))}. Choose another "
                f"one of {', '.join(WAYS)}."
            )
        return lines


def repeat_folder(folder: str, number: int) -> str:
    """Returns the folder of a repeat."""
    return os.path.join(folder, f"repeat-{number}")


def _prepare_folder(trial: Trial, output_folder: OutputFolder) -> None:
    """Empties the folder of a run, so that no run resumes from an earlier job, and writes a note of the trial."""
    output_folder.clear(os.path.basename(trial.folder))
    try:
        os.makedirs(trial.folder)
        with open(os.path.join(trial.folder, _NOTE), "w", encoding="utf-8") as file:
            file.write(trial.to_json())
    except OSError as error:
        raise LaunchError(
            f"--out {path_for_message(trial.folder)} cannot be written ({error}). Name another folder."
        ) from error
