"""`npu-run bisect`: finds the operators that must stay float32 if a low-precision training is to keep its results."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from npu_bridge.base.files import write_atomically
from npu_bridge.base.output_folders import OutputFolder
from npu_bridge.base.reading import read_json
from npu_bridge.base.terminal import echo, path_for_message
from npu_run.command_line import ScriptCommand, add_launcher_options, exit_on_errors, print_unless_quiet
from npu_run.errors import LaunchError
from npu_run.outputs import claim_command_output
from npu_run.repeat import repeat_folder
from npu_run.trials.search import Operator, OutOfRunsError, SearchResult, find_minimal_float32_set
from npu_run.trials.trial import FLOAT32, Trial, run_trial

LOW_MODES = (
    "allow_mix_precision",
    "allow_mix_precision_fp16",
    "allow_mix_precision_bf16",
    "force_fp16",
    "cube_fp16in_fp32out",
)
_STATE, _OPERATORS, _KEPT, _MIXLIST = "state.json", "operators.json", "kept.txt", "mixlist.json"
_REFERENCES = 3


@click.command(cls=ScriptCommand)
@click.option(
    "--low", type=click.Choice(LOW_MODES), default=LOW_MODES[0], show_default=True, help="The precision mode to try."
)
@click.option("--steps", type=click.IntRange(min=1), default=20, show_default=True, help="Steps of each run.")
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    default=0.02,
    show_default=True,
    help="Share of the loss by which a passing run can differ, if the band of rounding is narrower.",
)
@click.option("--max-runs", type=click.IntRange(min=5), default=40, show_default=True, help="Runs to make at most.")
@click.option("-o", "--out", default="bisect", show_default=True, metavar="DIR", help="Folder; a search in it resumes.")
@add_launcher_options
def bisect(
    low: str,
    steps: int,
    tolerance: float,
    max_runs: int,
    out: str,
    launcher: list[str],
    script: str,
    arguments: tuple[str, ...],
):
    """Finds the smallest set of operators that must stay float32 when SCRIPT trains in low precision.

    Starts with three float32 runs whose initial weights differ by rounding. Then trains in low precision and keeps
    ever fewer operators in float32: whole name scopes first, then types, then single operators. Prints the set.
    """
    bisection = Bisection(os.path.abspath(out), low, steps, tolerance, max_runs, [*launcher, script, *arguments])
    with exit_on_errors(LaunchError):
        sys.exit(bisection.run())


class Bisection:
    """A search for the operators to keep in float32. Its state is kept in a folder, from which a later call resumes.

    Args:
      folder: absolute path for runs, `state.json` and results.
      low: the low precision mode.
      steps: number of steps of each run.
      tolerance: how much results may differ; see `npu-run bisect --help`.
      max_runs: largest number of runs, including those of earlier calls.
      command: the words of the command line after `npu-run`.
    """

    def __init__(self, folder: str, low: str, steps: int, tolerance: float, max_runs: int, command: Sequence[str]):
        self.folder, self._low, self._max_runs, self._command = folder, low, max_runs, list(command)
        self._steps, self._tolerance = steps, tolerance
        self._asked = {"low": low, "steps": steps, "tolerance": tolerance, "command": self._command}
        self._runs: list[dict[str, Any]] = []  # the operators each run kept, and whether it passed, in order
        self._band: Any = None
        self._is_by_type = False
        self._own: OutputFolder

    def run(self) -> int:
        """Searches, prints the result and writes it to the folder; returns 0, or 2 if there is no result.

        Raises:
          LaunchError: the script fails in float32, or does not train through sessions, an Estimator or `model.fit`.
        """
        with claim_command_output(self.folder, "--out", "npu-run bisect") as self._own:
            self._own.check("repeat-*", "run-*", _STATE, _OPERATORS, _KEPT, _MIXLIST)
            return self._search()

    def _search(self) -> int:
        self._load_runs_of_earlier_search()
        self._train_float32_runs()
        operators = self._read_operators()
        self._is_by_type = all(operator.name == operator.type for operator in operators)  # those of model.fit
        if self._is_by_type and not self._low.startswith("allow_mix"):
            raise LaunchError(
                f"in model.fit only types of operators can be kept, for which {self._low} has no lists. Expected --low "
                f"allow_mix_precision, allow_mix_precision_fp16 or allow_mix_precision_bf16; got {self._low}."
            )
        self._print_progress(f"{len(operators)} operators may be lowered")
        found = find_minimal_float32_set(operators, self._is_run_accepted)
        if found is None:
            self._print_always(
                f"even with all {len(operators)} operators in float32 the run does not pass: the difference is in no "
                "operator of a training step. "
                f"Compare {os.path.join(self._shown_folder, 'run-001')} with repeat-0."
            )
            return 2
        self._print_result(found, len(operators))
        return 0

    def _read_operators(self) -> list[Operator]:
        try:
            return [Operator(**each) for each in read_json(_OPERATORS, within_folder=self.folder)]
        except (OSError, ValueError, TypeError) as error:
            path = os.path.join(self._shown_folder, _OPERATORS)
            raise LaunchError(
                f"{path} cannot be read ({error}). Remove {self._shown_folder}, or choose another --out."
            ) from error

    @property
    def _shown_folder(self) -> str:
        return path_for_message(self.folder)

    def _load_runs_of_earlier_search(self) -> None:
        """Loads the runs of an earlier search in this folder; raises LaunchError if that search had other settings."""
        path = Path(self.folder, _STATE)
        if not path.exists():
            return
        try:
            state = read_json(path, within_folder=self.folder)
            before, runs = dict(state["asked"]), [{**run, "kept": list(run["kept"])} for run in state["runs"]]
            if not all(isinstance(run["passes"], bool) for run in runs):
                raise TypeError("a run has neither passed nor failed")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LaunchError(
                f"{os.path.join(self._shown_folder, _STATE)} does not come from an earlier search ({error}). "
                f"Remove the folder, or choose another one with --out."
            ) from error
        if before != self._asked:
            changed = ", ".join(name for name, value in self._asked.items() if before.get(name) != value)
            raise LaunchError(
                f"{self._shown_folder} holds another search. Expected the same {changed}; got a different value. "
                f"Choose another folder with --out."
            )
        self._runs = runs
        self._print_progress(f"resumes after {len(self._runs)} runs in low precision")

    def _train_float32_runs(self) -> None:
        """Makes the float32 runs whose losses give the noise band, except finished ones; measures the band."""
        for number in range(_REFERENCES):
            folder = repeat_folder(self.folder, number)
            done = Path(folder, "done")
            if done.exists():
                continue
            operators = os.path.join(self.folder, _OPERATORS) if number == 0 else ""
            trial = Trial(folder=folder, seed=0, rounding=number, steps=self._steps, operators=operators)
            code = self._train(trial, FLOAT32)
            if code:
                raise LaunchError(
                    f"the script ended with exit code {code} in float32. Its output is in "
                    f"{path_for_message(folder)}/output.log."
                )
            if operators and not os.path.exists(operators):
                raise LaunchError(
                    "no run of a session was a training step. Expected a script that trains through sessions, an "
                    "Estimator or model.fit of Keras; got none. Eager code has no graph that lists its operators."
                )
            done.touch()
        from npu_run.trials.acceptance import Float32Band

        self._band = Float32Band([repeat_folder(self.folder, number) for number in range(_REFERENCES)], self._tolerance)
        self._print_progress(f"float32: {self._band}")

    def _is_run_accepted(self, kept_operators: frozenset[str]) -> bool:
        names = sorted(kept_operators)
        for run in self._runs:
            if run["kept"] == names:
                return run["passes"]
        run_name = self._next_run_name()
        if self._is_by_type:
            options = {"modify_mixlist": self._write_types(names, f"{run_name}.json")}
        else:
            options = {"customize_dtypes": self._write_names(names, f"{run_name}.txt")}
        return self._train_and_judge(names, options)

    def _train_and_judge(self, kept_names: list[str], options: dict[str, Any], description: str = "") -> bool:
        """Trains once in low precision; records and returns whether the losses stay in the band.

        `options` keep these names or types in float32; `description` is for the progress line.
        """
        if len(self._runs) + _REFERENCES >= self._max_runs:
            raise OutOfRunsError
        folder = os.path.join(self.folder, self._next_run_name())
        trial = Trial(folder=folder, seed=0, steps=self._steps)
        code = self._train(trial, {"precision_mode": self._low, "precision_mode_v2": None, **options})
        passes, why = (False, f"exit code {code}") if code else self._band.judge_run(folder)
        description = description or f"{len(kept_names)} operator{'' if len(kept_names) == 1 else 's'} in float32"
        self._print_progress(
            f"run {len(self._runs) + _REFERENCES + 1}: {description}: {'inside' if passes else 'outside'} ({why})"
        )
        self._runs.append({"kept": kept_names, "passes": passes, "why": why})
        state = {"asked": self._asked, "runs": self._runs}
        write_atomically(os.path.join(self.folder, _STATE), json.dumps(state, indent=1))
        return passes

    def _train(self, trial: Trial, options: dict[str, Any]) -> int:
        self._own.clear(os.path.basename(trial.folder))  # left by a search that was interrupted in this run
        os.makedirs(trial.folder)
        imposed = {"precision_mode_v2": None, "iterations_per_loop": 1, "accelerate_train_mode": None, **options}
        return run_trial(trial, self._command, imposed, os.path.join(trial.folder, "output.log"))

    def _next_run_name(self) -> str:
        return f"run-{len(self._runs):03d}"

    def _write_names(self, names: Sequence[str], file: str) -> str:
        """Writes a `customize_dtypes` file that keeps these operators in float32."""
        path = Path(self.folder, file)
        path.write_text("".join(f"{name}::InputDtype:float32,OutputDtype:float32\n" for name in names), "utf-8")
        return str(path)

    def _write_types(self, types: Sequence[str], file: str) -> str:
        """Writes a `modify_mixlist` file that keeps operators of these types in float32."""
        path = os.path.join(self.folder, file)
        Path(path).write_text(json.dumps({"black-list": {"to-add": types}}, indent=1) + "\n", "utf-8")
        return path

    def _print_result(self, result: SearchResult, operator_count: int) -> None:
        """Prints the operators to keep in float32 and how to do so; tests whether listing their types is enough."""
        if not result.kept:
            self._print_always(f"none of {operator_count} operators must stay float32: {self._low} passes as it is")
            return
        runs = len(self._runs) + _REFERENCES
        what = "the smallest set" if result.is_smallest else f"not the smallest set: {runs} runs are the limit"
        self._print_always(f"{len(result.kept)} of {operator_count} operators must stay float32 ({what}; {runs} runs)")
        if self._is_by_type:
            types = [operator.type for operator in result.kept]
            mixlist = path_for_message(self._write_types(types, _MIXLIST))
            echo(f"\nthese types: modify_mixlist={mixlist!r} ({', '.join(types)})")
            return
        names = self._write_names([operator.name for operator in result.kept], _KEPT)
        types = sorted({operator.type for operator in result.kept})
        mixlist = self._write_types(types, _MIXLIST)
        lines = [f"\noperators, exactly: customize_dtypes={path_for_message(names)!r}"]
        lines += [f"  {operator.name} ({operator.type})" for operator in result.kept[:20]]
        lines += [f"  and {len(result.kept) - 20} more"] if len(result.kept) > 20 else []
        lines += [f"\nthe same in the script, with npu_scope:\n{_format_scope_code(result.kept)}"]
        lines += [f"\nall operators of their types: modify_mixlist={path_for_message(mixlist)!r} ({', '.join(types)})"]
        echo("\n".join(lines))
        if not self._low.startswith("allow_mix"):
            echo(f"  for the allow_mix_precision modes; {self._low} has no lists")
            return
        label = f"mix list of {', '.join(types)}"
        known = [run for run in self._runs if run["kept"] == [label]]
        try:
            passes = known[0]["passes"] if known else self._train_and_judge([label], {"modify_mixlist": mixlist}, label)
        except OutOfRunsError:
            echo("  not tried: no runs are left")
            return
        fails = "  it does not pass, as casts are at other places; keep the operators instead"
        echo("  it passes, too" if passes else fails)

    def _print_progress(self, text: str) -> None:
        print_unless_quiet(f"npu-run bisect: {text}")

    def _print_always(self, text: str) -> None:
        """Prints a result, even with `--quiet`."""
        echo(f"npu-run bisect: {text}", err=True)


def _format_scope_code(kept_operators: Sequence[Operator]) -> str:
    """Returns script code that keeps operators in float32: a block for each script line that makes any of them."""
    lines: dict[str, list[str]] = {}
    for operator in kept_operators:
        lines.setdefault(operator.where, []).append(operator.name)
    blocks = []
    for where, names in lines.items():
        place, _, code = where.partition(": ")
        if where:
            blocks.append(f"  with keep_dtype_scope():  # {place}, makes {', '.join(names[:3])}\n      {code}")
        else:
            blocks.append(f"  (of the backward pass, by name only: {', '.join(names[:3])})")
    return "\n".join(blocks)
