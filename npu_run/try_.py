"""`npu-run try`: trains the first steps in a temporary folder, and reports in a few lines whether the script trains."""

from __future__ import annotations

import collections
import math
import os
import shlex
from typing import Any

import click

from npu_bridge.base.files import temporary_folder
from npu_bridge.base.reading import open_file, read_json
from npu_bridge.base.terminal import echo, escape_in_line
from npu_bridge.reporting.history import HISTORY_FILE, History
from npu_run.command_line import ScriptCommand, add_json_option, add_launcher_options, exit_on_errors, print_json
from npu_run.errors import LaunchError
from npu_run.trials.trial import Trial, run_trial

__all__: list[str] = []

_LAST_LINES = 15


@click.command("try", cls=ScriptCommand)
@click.option("--steps", type=click.IntRange(min=1), default=3, show_default=True, help="Steps to train.")
@add_json_option
@add_launcher_options
def try_script(steps: int, as_json: bool, launcher: list[str], script: str, arguments: tuple[str, ...]):
    """Trains the first steps of SCRIPT and says whether it trains; keeps nothing.

    Estimators start anew in a temporary folder; files that the script writes elsewhere stay. The script ends after the
    last of these steps, before any evaluation. The exit code is 1 if the script does not train.
    """
    with exit_on_errors(LaunchError), temporary_folder("npu-run-try-") as folder:
        ranks = launcher[launcher.index("-np") + 1] if "-np" in launcher else "1"
        step, rank = "step" if steps == 1 else "steps", "rank" if ranks == "1" else "ranks"
        title = f"try: {os.path.basename(script)}, {steps} {step} on {ranks} {rank}, in a temporary folder"
        echo(title, err=as_json)
        trial = Trial(folder=folder, steps=steps, parameters=os.path.join(folder, "parameters.json"))
        log = os.path.join(folder, "log.txt")
        code = run_trial(trial, [*launcher, script, *arguments], log=log)
        rows = History(os.path.join(folder, HISTORY_FILE)).rows
        if code:
            with open_file(log, errors="replace") as file:
                for line in collections.deque(file, maxlen=_LAST_LINES):
                    shown = escape_in_line(line.rstrip("\n"))
                    echo(f"  {shown}", err=as_json)
        problem = _describe_problem(code, rows)
        count = read_json(trial.parameters, within_folder=folder) if os.path.exists(trial.parameters) else None
        if as_json:
            losses = [row.loss if row.loss is not None and math.isfinite(row.loss) else None for row in rows]
            skipped = sum(row.skipped for row in rows)
            print_json(int(bool(problem)), {"why": problem, "losses": losses, "skipped": skipped, "parameters": count})
            raise SystemExit(int(bool(problem)))
        if problem:
            echo(f"try: it does not train: {problem}")
            raise SystemExit(1)
        echo(f"try: it trains: {_describe_training(rows, count)}")
        echo(f"try: next, the whole training: npu-run {shlex.join([*launcher, script, *arguments])}")


def _describe_problem(code: int, rows: list[Any]) -> str:
    """Returns the reason why a script does not train; "" if it trains."""
    if code:
        where = f"after step {rows[-1].step}" if rows else "before the end of its first step"
        return f"it ended {where} with exit code {code}; its last lines are above"
    if not rows:
        return "no step of a session, an Estimator or model.fit was found; try looks at these alone"
    bad = next((row for row in rows if row.loss is not None and not math.isfinite(row.loss)), None)
    if bad is not None and not bad.skipped:
        return f"the loss of step {bad.step} is {bad.loss}"
    return ""


def _describe_training(rows: list[Any], count: int | None) -> str:
    losses = " -> ".join(f"{row.loss:.5g}" for row in rows if row.loss is not None)
    parts = [f"loss {losses}" if losses else "its loss is not known"]
    skipped = sum(row.skipped for row in rows)
    if skipped:
        parts.append(f"skipped {skipped} of {len(rows)} steps, while the loss scale settles")
    if count is not None:
        parts.append(f"{count:,} parameters")
    secs = rows[-1].time - rows[0].time
    if secs > 0:
        parts.append(f"{(len(rows) - 1) / secs:.3g} steps/s after the first one")
    return ", ".join(parts)


def __getattr__(name: str) -> Any:
    """Returns the command for the attribute `try`, which no `def` can define: `try` is a keyword of Python."""
    if name == "try":
        return try_script
    raise AttributeError(name)
