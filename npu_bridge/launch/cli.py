"""`npu-run`: its options and the list of its commands; starts a training script on one or more ranks.

`npu-run NAME` runs a sub-command when NAME is one and no file of that name is there; everything else is a
script.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import os
import re
import sys
from pathlib import Path
from typing import Callable

import click

from npu_bridge import __version__
from npu_bridge.base import environment
from npu_bridge.base.files import NotOursError
from npu_bridge.base.terminal import echo, in_line
from npu_bridge.launch.command_line import Command, fail
from npu_bridge.launch.errors import LaunchError
from npu_bridge.launch.job.hosts import Plan, plan_job
from npu_bridge.launch.job.output import LOG_FILES
from npu_bridge.launch.job.rank_process import rank_command, rank_defaults
from npu_bridge.launch.job.supervisor import Outcome, check_thread, run_ranks
from npu_bridge.launch.outputs import check_file, own_output
from npu_bridge.launch.repeat import WAYS, Repeats
from npu_bridge.launch.source_choice import REPORT_FILES, SourceChoice
from npu_bridge.launch.timeline import FILES, Recording

__all__ = ["COMMANDS", "main", "run_script"]

# Sub-commands: where each is found once it is asked for. A script that happens to be called like one goes first.
COMMANDS = {
    "bisect": "npu_bridge.launch.bisect",
    "check": "npu_bridge.launch.check",
    "compare": "npu_bridge.launch.compare",
    "doctor": "npu_bridge.launch.doctor.command",
    "explain": "npu_bridge.launch.explain",
    "plan": "npu_bridge.launch.predict.command",
    "record": "npu_bridge.launch.record",
    "replay": "npu_bridge.launch.record",
    "report": "npu_bridge.launch.report",
    "try": "npu_bridge.launch.try_",
}


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the console script; ends the process with the job's exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    name = arguments[0] if arguments else ""
    if name in COMMANDS and not Path(name).exists():
        command = getattr(importlib.import_module(COMMANDS[name]), name)
        command.main(arguments[1:], prog_name=f"npu-run {name}")
    run_script.main(arguments, prog_name="npu-run")


def _finite(context: click.Context, option: click.Parameter, number: float | None) -> float | None:
    """A number of seconds that can be waited for: NaN is neither above nor below a bound."""
    if number is not None and not math.isfinite(number):
        raise click.BadParameter(f"expected seconds, 0 for never; got {number}.")
    return number


def _refuse_split(context: click.Context, option: click.Parameter, given: str | None) -> None:
    if given is not None:
        fail(
            "npu-run: --split is gone, as the best split saved no more than 3 % of a measured step: leave it out, or "
            "set the split that npu-run plan finds."
        )


@click.command(
    cls=Command,
    # The first word that is not an option is the script; whatever follows is the script's own, options included.
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]},
    options_metavar="[-np N] [-H HOST:SLOTS,...] [OPTIONS]",
    epilog="Options of npu-run come before SCRIPT; everything after it is passed to the script. npu-run check SCRIPT "
    "says what a script uses and what of it cannot work; npu-run compare A B says whether two trainings agree, npu-run "
    "bisect which operators must stay float32; npu-run record and npu-run replay fix the start of a training; npu-run "
    "doctor says whether a run would work here, and what to fix; npu-run explain lists the stages that a "
    "configuration adds to a training; npu-run plan predicts how fast it would be on other numbers of ranks; npu-run "
    "report FOLDER makes a page of a training.",
)
@click.option(
    "-np",
    "size",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of ranks. Default: all slots of the hosts, or 1.",
)
@click.option("-H", "hosts", metavar="HOST:SLOTS,...", help="Hosts to start ranks on, for example h1:4,h2:4.")
@click.option("--hostfile", metavar="FILE", help="The same from a file, a line for each host: h1 slots=4.")
@click.option("--rank-table", metavar="FILE", help="Hosts, ranks and devices from a rank table (JSON).")
@click.option("--log-dir", metavar="DIR", help="Keep what each rank prints in DIR/rank_<n>.log as well.")
@click.option(
    "--restarts",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Start the whole job again, up to N times, when a rank has failed. Default: 0.",
)
@click.option(
    "--repeat",
    type=click.IntRange(min=2),
    metavar="N",
    help="Run the script N times, each with a harmless difference; what it spreads is noise to npu-run compare.",
)
@click.option(
    "--vary",
    type=click.Choice(WAYS),
    default="seed",
    show_default=True,
    help="The difference of --repeat: other seeds, sums in another order, or initial weights off by one rounding.",
)
@click.option(
    "--out",
    default="repeats",
    show_default=True,
    metavar="DIR",
    help="Folder for --repeat: run K writes to DIR/repeat-K, which {out} stands for among the script's arguments.",
)
@click.option(
    "--stall-secs",
    type=click.FloatRange(min=0),
    callback=_finite,
    metavar="SECS",
    help="End the job when a rank has been waiting for the others as long as this; 0: never. Default: when every rank "
    "has been waiting, and none computing, for 600 s.",
)
@click.option(
    "--timeline",
    metavar="FIRST:LAST",
    help="Record training steps FIRST to LAST-1 on every rank, and draw the exposed tail.",
)
@click.option(
    "--timeline-dir", default="timeline", show_default=True, metavar="DIR", help="Folder for what --timeline writes."
)
@click.option("--split", hidden=True, expose_value=False, callback=_refuse_split)
@click.option(
    "--tf1", "era", flag_value=1, type=int, help="The script is one of TensorFlow 1. Default: its text decides."
)
@click.option("--tf2", "era", flag_value=2, type=int, help="The script is one of TensorFlow 2.")
@click.option(
    "--tree",
    "trees",
    multiple=True,
    metavar="DIR",
    help="Modules in DIR are the script's own, too, like those in its folder and below, and see the same TensorFlow.",
)
@click.option(
    "--report",
    metavar="FILE",
    help="Write what the script used, what was left out and what differs from an NPU to FILE (JSON), and print it.",
)
@click.option("--verbose", is_flag=True, help="Show all that TensorFlow says, as NPU_BRIDGE_VERBOSE=1 does.")
@click.version_option(__version__, prog_name="npu-run")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
def run_script(
    size: int | None,
    hosts: str | None,
    hostfile: str | None,
    rank_table: str | None,
    log_dir: str | None,
    restarts: int,
    repeat: int | None,
    vary: str,
    out: str,
    stall_secs: float | None,
    timeline: str | None,
    timeline_dir: str,
    era: int | None,
    trees: tuple[str, ...],
    report: str | None,
    verbose: bool,
    script: str,
    arguments: tuple[str, ...],
):
    """Runs the Python file SCRIPT on N ranks, with RANK_ID, RANK_SIZE and DEVICE_ID set for each.

    One rank runs as a plain process, without Horovod. When a rank fails, the others are stopped, and the last
    lines tell which rank it was and how it ended; its exit code is that of npu-run.
    """
    outputs = contextlib.ExitStack()
    try:
        _check_script(script)
        recording = None if timeline is None else Recording.of_text(timeline, timeline_dir)
        plan = plan_job(size, hosts, hostfile, rank_table)
        repeats = None if repeat is None else Repeats(repeat, vary, os.path.abspath(out))
        _take_outputs(outputs, plan, log_dir, repeats, recording, report)
        if verbose or environment.is_flag_on(environment.VERBOSE):
            environment.write_variable(environment.VERBOSE, 1)
            os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "0")
        SourceChoice(era or 0, tuple(map(os.path.abspath, trees)), report and os.path.abspath(report)).announce()
        if recording is not None:
            recording.announce(plan.size)
        if restarts:
            environment.write_variable(environment.RESTARTS, restarts)
        # At once: until TensorFlow is loaded and the ranks have met, nothing else is to be seen.
        _announce_start(script, plan)
        sys.stdout.flush()
        given = list(arguments)

        def run(words: list[str]) -> int:
            return _run_again(functools.partial(run_ranks, script, words, plan, log_dir, stall_secs), restarts)

        if repeats is not None:
            sys.exit(repeats.run(given, run, _say))
        if plan.is_local and plan.size == 1 and log_dir is None and not restarts and recording is None:
            _run_alone(script, given, plan)
        code = run(given)
        if recording is not None:
            echo(recording.conclude(plan.size), err=True)
    except (LaunchError, NotOursError) as error:
        fail(f"npu-run: {in_line(str(error))}")
    finally:
        outputs.close()
    sys.exit(code)


def _take_outputs(
    outputs: contextlib.ExitStack,
    plan: Plan,
    log_dir: str | None,
    repeats: Repeats | None,
    recording: Recording | None,
    report: str | None,
) -> None:
    """Holds the folders that the job writes to, until `outputs` is closed; before anything is started."""
    # Where another launcher has started one npu-run for each rank, they share these folders.
    holds = plan.size > 1 or environment.launched() is None
    check_file(report, "--report", REPORT_FILES)
    if log_dir is not None:
        own = outputs.enter_context(own_output(log_dir, "--log-dir", holds=holds))
        for rank in range(plan.size):
            check_file(os.path.join(own.path, f"rank_{rank}.log"), "--log-dir", LOG_FILES)
    if repeats is not None:
        outputs.enter_context(own_output(repeats.folder, "--out", holds=holds)).check(*repeats.names)
    if recording is not None:
        outputs.enter_context(own_output(recording.folder, "--timeline-dir", holds=holds)).clear(*FILES)


def _announce_start(script: str, plan: Plan) -> None:
    """Says how many ranks there will be. Where another launcher has started one npu-run for each, rank 0 says it."""
    placed = environment.launched() if plan.size == 1 else None
    if placed is not None and placed.rank > 0:
        return
    size = plan.size if placed is None else placed.size
    ranks = f"{size} rank{'' if size == 1 else 's'}"
    echo(f"npu-run: starting {ranks} of {in_line(script)}{'' if plan.is_local else f' on {plan.hosts}'}", err=True)


def _say(text: str) -> None:
    echo(f"npu-run: {text}", err=True)


def _run_again(run: Callable[[], Outcome], restarts: int) -> int:
    """Runs a job, and again when it has failed; the script goes on from its last checkpoint by itself."""
    outcome = run()
    for attempt in range(1, restarts + 1):
        if not outcome.has_failed:
            break
        echo(f"npu-run: restart {attempt} of {restarts}, after exit code {outcome.exit_code}", err=True)
        outcome = run()
    return outcome.exit_code


def _check_script(script: str) -> None:
    if os.path.isfile(script):
        return
    if re.fullmatch(r"python[\d.]*", os.path.basename(script)):
        raise LaunchError("name the script alone, without python before it: npu-run -np 2 train.py")
    raise LaunchError(
        f"there is no file {script!r} to run. Expected a Python script, then its arguments. Commands of npu-run are "
        f"{', '.join(sorted(COMMANDS))}."
    )


def _run_alone(script: str, arguments: list[str], plan: Plan) -> None:
    """Becomes the script's process: signals, terminal and exit code are then the script's own."""
    check_thread()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", rank_defaults(1)["TF_CPP_MIN_LOG_LEVEL"])
    os.execv(sys.executable, rank_command(script, arguments, plan.devices))
