"""`npu-run`: starts a training script on one or more ranks, or dispatches to a command.

`npu-run NAME` runs the command NAME, unless a file of that name exists; any other word is a script.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from npu_bridge import __version__
from npu_bridge.base import environment, memory_folders
from npu_bridge.base.files import NotOursError
from npu_bridge.base.output_folders import OutputFolder
from npu_bridge.base.terminal import echo, escape_in_line
from npu_bridge.collective.engines import engine_of_ranks
from npu_bridge.options.rank_table import MOST_RANKS
from npu_run.command_line import (
    ScriptCommand,
    add_script_arguments,
    add_settings_option,
    add_source_options,
    announce_settings,
    exit_with_message,
    print_unless_quiet,
)
from npu_run.commands import COMMANDS, GROUPS, describe_missing_script, find_command
from npu_run.errors import LaunchError, check_is_main_thread
from npu_run.job.elastic import WAIT_SECS, RankBounds, determine_rank_bounds
from npu_run.job.hosts import JobPlan, plan_job
from npu_run.job.output import LOG_FILES
from npu_run.job.rank_process import default_rank_environment, rank_command
from npu_run.job.starts import RestartableJob
from npu_run.outputs import check_output_file, claim_command_output
from npu_run.remote.task_agent import find_task, serve_task_0
from npu_run.remote.tasks import become_launcher_of_tasks
from npu_run.repeat import WAYS, Repeats
from npu_run.tensorflow_choice import TensorFlowChoice
from npu_run.timeline import FILES, Recording

_COMPLETION = "_NPU_RUN_COMPLETE"  # set by a shell that asks for completions
_RANGE = re.compile(r"\s+\[x>=\d+\]$")  # click appends it to the help of a number
# Headings of the help, and the options below each; all other options come last.
_OPTIONS = {
    "Ranks": (
        *("size", "hosts", "hostfile", "rank_table", "restarts", "stall_secs"),
        *("least", "most", "hosts_from", "wait_secs", "cool_down_secs", "collectives", "open_ports"),
    ),
    "Output": ("out", "logs", "timeline", "repeat", "vary"),
    "The script": ("settings", "era", "trees"),
}


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line `npu-run`; ends the process with the exit code of the job or command."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if environment.read_variable(_COMPLETION):
        from npu_run.completion import CompletionGroup

        CompletionGroup(run_script).main(arguments, prog_name="npu-run", complete_var=_COMPLETION)
    name = arguments[0] if arguments else ""
    if name in COMMANDS and not Path(name).is_file():
        find_command(name).main(arguments[1:], prog_name=f"npu-run {name}")
    run_script.main(arguments, prog_name="npu-run")


class _Launcher(ScriptCommand):
    """The command `npu-run` without a command name: its help lists the commands and groups the options."""

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the two forms of use: with a script, and with a command."""
        formatter.write_usage(ctx.command_path, "[OPTIONS] SCRIPT [ARGS]...")
        formatter.write_usage(ctx.command_path, "COMMAND [OPTIONS] ...", prefix="       ")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the commands, then the options."""
        width = max(map(len, COMMANDS))
        for title, lines in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), line) for name, line in lines.items()])
        titles = {name: title for title, names in _OPTIONS.items() for name in names}
        rows: dict[str, list[tuple[str, str]]] = {title: [] for title in (*_OPTIONS, "Others")}
        for param in self.get_params(ctx):
            row = param.get_help_record(ctx)
            if row is not None and isinstance(param, click.Option):
                rows[titles.get(param.name, "Others")].append(row)
        width = max(len(name) for each in rows.values() for name, _ in each)
        for title, each in rows.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), _RANGE.sub("", text)) for name, text in each])


def _check_finite(context: click.Context, option: click.Parameter, number: float | None) -> float | None:
    """Returns a number of seconds; refuses infinity, and NaN, which would pass every check of a bound."""
    if number is not None and not math.isfinite(number):
        raise click.BadParameter(f"expected seconds, 0 for never; got {number}.")
    return number


_RANKS: dict[str, Any] = {"type": click.IntRange(min=1), "metavar": "N"}
_SECONDS: dict[str, Any] = {"type": click.FloatRange(min=0), "callback": _check_finite, "metavar": "SECS"}


@click.command(
    "npu-run",
    cls=_Launcher,
    no_args_is_help=True,
    epilog="npu-run COMMAND --help describes a command. Options come before SCRIPT; all words after SCRIPT are "
    "the script's.",
)
@click.option("-np", "size", **_RANKS, help="Number of ranks. Default: slots of the hosts, or 1.")
@click.option("-H", "hosts", metavar="HOST:SLOTS,...", help="Hosts to start ranks on: h1:4,h2:4.")
@click.option("--hostfile", metavar="FILE", help="Hosts from lines such as h1 slots=4.")
@click.option("--rank-table", metavar="FILE", help="Hosts from a rank table (JSON).")
@click.option(
    "--restarts",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Start a failed job again, up to N times.",
)
@click.option(
    "--stall-secs",
    **_SECONDS,
    help="End the job when a rank has waited SECS; 0: never. Default: when all ranks have waited for 600 s.",
)
@click.option("--min-np", "least", **_RANKS, help="Continue while N ranks are left.")
@click.option("--max-np", "most", **_RANKS, help="Take in ranks up to N. Default: -np.")
@click.option("--hosts-from", metavar="COMMAND", help="Command that prints the current hosts: h1:4.")
@click.option("--wait", "wait_secs", **_SECONDS, help="How long to wait for --min-np or tasks. Default: 600.")
@click.option("--cool-down", "cool_down_secs", **_SECONDS, help="Avoid a slot that lost a rank for SECS. Default: 60.")
@click.option("-o", "--out", metavar="DIR", help="Output folder. Default: logs, timeline or repeats.")
@click.option("--logs", is_flag=True, help="Keep what each rank prints, in rank_<n>.log.")
@click.option("--timeline", metavar="FIRST:LAST", help="Record these steps on every rank, and draw them.")
@click.option(
    "--repeat",
    type=click.IntRange(min=2),
    metavar="N",
    help="Run N times, varied; {out} in ARGS: a run's folder.",
)
@click.option(
    "--vary",
    type=click.Choice(WAYS),
    metavar="WAY",
    help="Vary seed (the default), order or rounding.",
)
@click.option(
    "--collectives",
    type=click.Choice(environment.ENGINES),
    metavar="ENGINE",
    help="horovod (the default, if installed) or tensorflow.",
)
@click.option("--allow-open-ports", "open_ports", is_flag=True, help="For tensorflow: open ports to hosts.")
@add_settings_option
@add_source_options
@click.version_option(__version__, prog_name="npu-run")
@add_script_arguments
def run_script(
    size: int | None,
    hosts: str | None,
    hostfile: str | None,
    rank_table: str | None,
    restarts: int,
    stall_secs: float | None,
    least: int | None,
    most: int | None,
    hosts_from: str | None,
    wait_secs: float | None,
    cool_down_secs: float | None,
    out: str | None,
    logs: bool,
    timeline: str | None,
    repeat: int | None,
    vary: str | None,
    collectives: str | None,
    open_ports: bool,
    settings: tuple[str, ...],
    era: int | None,
    trees: tuple[str, ...],
    script: str,
    arguments: tuple[str, ...],
):
    """Runs the Python file SCRIPT on N ranks, or runs a command.

    A single rank is a plain process. If a rank fails, the job ends and names it.
    """
    with contextlib.ExitStack() as outputs:
        try:
            if collectives is not None:
                environment.write_variable(environment.COLLECTIVES, collectives)
            if open_ports:
                environment.write_variable(environment.OPEN_PORTS, 1)
            tasks_wait_secs = WAIT_SECS if wait_secs is None else wait_secs
            task = None if any((size, hosts, hostfile, rank_table, hosts_from)) else find_task(sys.argv[1:])
            if task is not None and task.number > 0:
                serve_task_0(task, tasks_wait_secs, _print_progress)
            tasks = task and outputs.enter_context(become_launcher_of_tasks(task, tasks_wait_secs, _print_progress))
            if not os.path.isfile(script):
                raise LaunchError(describe_missing_script(script))
            announce_settings(settings)
            _check_outputs_are_used(out, logs, timeline, repeat, vary)
            log_dir = (out or "logs") if logs else None
            recording = None if timeline is None else Recording.parse(timeline, out or "timeline")
            plan = tasks.make_plan() if tasks else plan_job(size, hosts, hostfile, rank_table)
            elastic, plan = _elastic_bounds(click.get_current_context().params, plan, bool(tasks))
            is_on_one_machine = plan.is_local or len(plan.slots) == 1
            problem = engine_of_ranks.unsupported_job_reason(is_on_one_machine) if plan.size > 1 else ""
            if problem:
                raise LaunchError(problem)
            repeats = None if repeat is None else Repeats(repeat, vary or "seed", os.path.abspath(out or "repeats"))
            _reserve_outputs(outputs, plan, log_dir, repeats, recording)
            TensorFlowChoice(era or 0, tuple(map(os.path.abspath, trees))).announce()
            if recording is not None:
                recording.announce_to_ranks()
            if restarts or elastic:
                environment.write_variable(environment.RESTARTS, restarts or 1)
                outputs.enter_context(memory_folders.memory_folder_for_job())
            # Before anything else: nothing more is printed until TensorFlow is loaded and the ranks have met.
            _announce_start(script, plan, elastic)
            sys.stdout.flush()
            given = list(arguments)
            job = RestartableJob(
                script, plan, log_dir, stall_secs, restarts, tasks, elastic, hosts_from, _print_progress
            )
            if repeats is not None:
                sys.exit(repeats.run(given, job.run, _print_progress))
            supervised = log_dir is not None or restarts or recording is not None or elastic is not None
            if plan.is_local and plan.size == 1 and not supervised:
                _run_alone(script, given, plan)
            code = job.run(given)
            if recording is not None:
                echo(recording.draw_tail(plan.size), err=True)
            sys.exit(code)
        except (LaunchError, NotOursError) as error:
            exit_with_message(f"npu-run: {escape_in_line(str(error))}")


def _check_outputs_are_used(
    out: str | None, logs: bool, timeline: str | None, repeat: int | None, vary: str | None
) -> None:
    """Raises LaunchError for options that would have no effect."""
    if repeat is None and vary is not None:
        raise LaunchError("--vary says how the runs of --repeat differ. Add --repeat N, or omit --vary.")
    if repeat is not None and timeline is not None:
        raise LaunchError("--timeline records one run, but --repeat makes several. Omit one of the two.")
    if out is not None and not logs and timeline is None and repeat is None:
        raise LaunchError("--out is the folder of --logs, --timeline or --repeat. Add one of these, or omit --out.")


def _elastic_bounds(options: Mapping[str, Any], plan: JobPlan, has_tasks: bool) -> tuple[RankBounds | None, JobPlan]:
    """Returns the bounds and the plan of an elastic job; for any other job returns None and the unchanged plan.

    With `has_tasks`, another launcher has started one npu-run for each slot. Raises LaunchError if options contradict
    each other, or one is missing.
    """
    times = {name: options[name] for name in ("wait_secs", "cool_down_secs") if options[name] is not None}
    if has_tasks and "cool_down_secs" in times:
        raise LaunchError("--cool-down excludes slots of hosts, but a task always keeps its slot. Omit --cool-down.")
    if all(options[name] is None for name in ("least", "most", "hosts_from")):
        if times and not has_tasks:
            name = "--wait" if "wait_secs" in times else "--cool-down"
            raise LaunchError(f"{name} is only for elastic jobs. Add --min-np N, or omit {name}.")
        return None, plan
    excluded = [f"--{name.replace('_', '-')}" for name in ("rank_table", "timeline", "repeat") if options[name]]
    whole = plan if has_tasks else plan_job(None, options["hosts"], options["hostfile"]) if plan.slots else None
    numbers = determine_rank_bounds(
        options["least"], options["most"], options["size"], whole, options["hosts_from"], excluded
    )
    bounds = RankBounds(*numbers, **times)
    return bounds, whole or JobPlan(bounds.most, {})


def _reserve_outputs(
    outputs: contextlib.ExitStack,
    plan: JobPlan,
    log_dir: str | None,
    repeats: Repeats | None,
    recording: Recording | None,
) -> None:
    """Reserves the folders to which the job writes, until `outputs` is closed; called before any process starts."""
    # If another launcher started one npu-run for each rank, they share these folders.
    placed = environment.launcher_placement()
    holds = plan.size > 1 or placed is None or placed.size == 1
    taken: dict[str, OutputFolder] = {}

    def reserve(folder: str) -> OutputFolder:
        path = os.path.abspath(folder)
        if path not in taken:
            taken[path] = outputs.enter_context(claim_command_output(folder, "--out", is_exclusive=holds))
        return taken[path]

    if log_dir is not None:
        own = reserve(log_dir)
        for rank in range(plan.size):
            check_output_file(os.path.join(own.path, f"rank_{rank}.log"), "--out", LOG_FILES)
    if repeats is not None:
        reserve(repeats.folder).check(*repeats.names)
    if recording is not None:
        reserve(recording.folder).clear(*FILES)


def _print_progress(text: str) -> None:
    print_unless_quiet(f"npu-run: {escape_in_line(text)}")


def _announce_start(script: str, plan: JobPlan, elastic: RankBounds | None) -> None:
    """Prints the number of ranks; if another launcher started an npu-run for each rank, only rank 0 prints."""
    placed = environment.launcher_placement() if plan.size == 1 else None
    if placed is not None and placed.rank > 0:
        return
    size = plan.size if placed is None else placed.size
    ranks = f"{size} rank{'' if size == 1 else 's'}"
    if elastic is not None:
        most = f"to {elastic.most}" if elastic.most < MOST_RANKS else "or more"
        print_unless_quiet(f"npu-run: starting {elastic.least} {most} ranks of {escape_in_line(script)}")
        return
    print_unless_quiet(
        f"npu-run: starting {ranks} of {escape_in_line(script)}{'' if plan.is_local else f' on {plan.hosts}'}"
    )
    engine = engine_of_ranks.describe_engine() if size > 1 else ""
    if engine:
        print_unless_quiet(f"npu-run: {engine}")


def _run_alone(script: str, arguments: list[str], plan: JobPlan) -> None:
    """Replaces this process with the script, so that the script gets signals and terminal and sets the exit code."""
    check_is_main_thread()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", default_rank_environment(1)["TF_CPP_MIN_LOG_LEVEL"])
    os.execv(sys.executable, rank_command(script, arguments, plan.devices))
