"""`npu-run record` and `npu-run replay`: save a training's start, and repeat it on another machine."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from npu_bridge.base.reading import open_file, read_json
from npu_bridge.base.terminal import echo, path_for_message
from npu_run.command_line import (
    ScriptCommand,
    add_json_option,
    add_launcher_options,
    exit_on_errors,
    is_quiet,
    print_json,
)
from npu_run.errors import LaunchError
from npu_run.outputs import claim_command_output
from npu_run.trials.trial import FLOAT32, Trial, run_trial

SNIPPET = "replay_tf1.py"
_QUIET = ["-q"]
_ONE_STEP = {"iterations_per_loop": 1}  # with several steps in a run, only the last one could be recorded


@click.command(cls=ScriptCommand)
@click.option("-o", "--out", default="recorded", show_default=True, metavar="DIR", help="Folder for what is recorded.")
@click.option("--steps", type=click.IntRange(min=1), default=5, show_default=True, help="Steps to record.")
@click.option("--float32", is_flag=True, help="Keep every operator's dtype, whatever precision SCRIPT asks for.")
@click.option("--tensors", is_flag=True, help="Record what every operator of these steps computes, too.")
@add_launcher_options
def record(
    out: str, steps: int, float32: bool, tensors: bool, launcher: list[str], script: str, arguments: tuple[str, ...]
):
    """Records how SCRIPT starts to train: initial weights, and the inputs and random numbers of its first steps.

    Stores values by their graph names, as numpy files that any machine can read. The script ends after the last
    recorded step.
    """
    with exit_on_errors(LaunchError), claim_command_output(out, "--out", "npu-run record") as own:
        own.clear("rank_*", "run", SNIPPET)
        trial = Trial(os.path.join(os.path.abspath(out), "run"), 0, steps=steps, record=os.path.abspath(out))
        _run_record(trial._replace(tensors=tensors), float32, [*launcher, script], arguments)


@click.command(cls=ScriptCommand)
@click.option("-o", "--out", metavar="DIR", help="Folder for the run. Default: a folder replayed in RECORDED.")
@click.argument("recorded")
@add_json_option
@add_launcher_options
def replay(out: str | None, recorded: str, as_json: bool, launcher: list[str], script: str, arguments: tuple[str, ...]):
    """Trains SCRIPT from a start that `npu-run record` wrote to RECORDED, and compares the results bit for bit.

    The exit code is 1 when a loss or a weight differs.
    """
    recorded = os.path.abspath(recorded)
    out = os.path.abspath(out) if out else os.path.join(recorded, "replayed")
    with exit_on_errors(LaunchError):
        _check_record_files(recorded)
        with claim_command_output(out, "--out", "npu-run replay") as own:
            own.clear("run")
            facts = _run_replay(recorded, os.path.join(out, "run"), [*launcher, script, *arguments], as_json)
    code = int(bool(facts["differences"]))
    if as_json:
        print_json(code, facts)
    else:
        _print_replay_result(facts)
    sys.exit(code)


def _run_record(trial: Trial, float32: bool, command: list[str], arguments: Sequence[str]) -> None:
    out = trial.record
    code = run_trial(trial, [*_QUIET * is_quiet(), *command, *arguments], _options_to_impose(float32))
    found = [read_json(path, within_folder=out) for path in sorted(Path(out).glob("rank_*/record.json"))]
    if code or not found:
        why = f"the script ended with exit code {code}" if code else "no run of a session was a training step"
        raise LaunchError(
            f"nothing was recorded: {why}. Expected a script that trains through sessions, an Estimator or model.fit "
            f"of Keras, not eager code."
        )
    shutil.copyfile(Path(__file__).parent / "trials" / SNIPPET, os.path.join(out, SNIPPET))
    shown, facts = path_for_message(out), found[0]
    kinds = list(facts["kinds"].values())
    counts = ", ".join(
        f"{kinds.count(kind)} {what}"
        for kind, what in (("batch", "tensors of batches"), ("fed", "fed tensors"), ("random", "random tensors"))
    )
    echo(f"record: {facts['steps']} steps on {len(found)} rank(s): initial weights, {counts}; in {shown}")
    for name, why in facts["not_recorded"].items():
        echo(f"record: not recorded: {name}, as {why}")
    if not facts["weights_after"]:
        echo("record: not recorded: the last weights, because the session was closed before they could be read")
    for line in _describe_races(facts):
        echo(f"record: not repeatable: {line}")
    again = f"record: here, npu-run replay {shlex.join([shown, *command])}{' ...' * bool(arguments)} trains from it"
    if not facts["updates"]:  # of model.fit, which has no graph with names
        echo(again)
        return
    echo(
        f"{again}; on a machine without this package, copy {shown} there and pass its hook:\n\n"
        f"    from {SNIPPET[:-3]} import Replay  # {os.path.join(shown, SNIPPET)}\n"
        f"    estimator.train(input_fn, hooks=[Replay({shown!r})])  # a bare session: see the file"
    )


def _options_to_impose(float32: bool) -> dict[str, Any]:
    return {**_ONE_STEP, **FLOAT32} if float32 else _ONE_STEP


def _describe_races(facts: dict[str, Any]) -> list[str]:
    return [
        f"a step writes {name} ({writer}) while {others[0]} reads or writes it, in no order"
        for name, (writer, others) in facts.get("races", {}).items()
    ]


def _check_record_files(folder: str) -> None:
    """Raises `LaunchError` for links and pipes in a record: numpy and TensorFlow in the ranks would follow them."""
    if not os.path.exists(os.path.join(folder, "rank_0", "record.json")):
        raise LaunchError(
            f"{path_for_message(folder)} holds no record. Expected rank_0/record.json in it; got none. Name a folder "
            f"that npu-run record wrote."
        )
    for path in (*Path(folder).glob("rank_*/record.json"), *Path(folder).glob("rank_*/*.npz")):
        try:
            with open_file(path, "rb", within_folder=folder):
                pass
        except OSError as error:
            raise LaunchError(f"the record cannot be used: {error}. Record it again with npu-run record.") from error


def _run_replay(recorded: str, run: str, command: list[str], uses_stderr: bool) -> dict[str, Any]:
    """Runs the replay; returns a dict of `steps`, `ranks`, `differences` (dicts of `rank` and `what`) and `races`."""
    trial = Trial(folder=run, seed=0, replay=recorded)
    facts = read_json(os.path.join(recorded, "rank_0", "record.json"), within_folder=recorded)
    imposed = _options_to_impose(bool(facts.get("is_float32")))
    code = run_trial(trial, [*_QUIET * is_quiet(), *command], imposed, uses_stderr=uses_stderr)
    verdicts = read_verdicts(run)
    if code or not verdicts:
        why = f"the script ended with exit code {code}" if code else "it trained fewer steps than were recorded"
        raise LaunchError(f"{why}; nothing was compared.")
    differences = [
        {"rank": rank, "what": text} for rank, verdict in verdicts.items() for text in verdict["differences"]
    ]
    steps = min(verdict["steps"] for verdict in verdicts.values())
    return {"steps": steps, "ranks": len(verdicts), "differences": differences, "races": _describe_races(facts)}


def read_verdicts(folder: str) -> dict[int, dict[str, Any]]:
    """Returns the verdicts that the ranks of a replay have written, by rank."""
    paths = {int(path.stem.rpartition("_")[2]): path for path in Path(folder).glob("replay_rank_*.json")}
    return {rank: read_json(path, within_folder=folder) for rank, path in sorted(paths.items())}


def _print_replay_result(facts: dict[str, Any]) -> None:
    steps = f"{facts['steps']} steps on {facts['ranks']} rank(s)"
    differences, races = facts["differences"], facts["races"]
    for each in differences[:10]:
        echo(f"replay: rank {each['rank']}: {each['what']}")
    if not differences:
        echo(f"replay: {steps}: losses and weights equal the record, bit for bit")
    elif races:
        echo(f"replay: {steps}: not repeatable, not even on the recording machine: {'; '.join(races)}")
    else:
        echo(f"replay: {steps}: {len(differences)} losses or weights differ from the record")
