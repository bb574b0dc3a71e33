"""`npu-run`: starts a training script on one or more ranks.

`npu-run NAME` runs a sub-command when NAME is one and no file of that name is there; everything else is a
script.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import click

from npu_bridge import __version__
from npu_bridge.launch.errors import LaunchError
from npu_bridge.launch.local_ranks import rank_defaults, run_local_ranks
from npu_bridge.launch.rank_process import rank_command

__all__ = ["COMMANDS", "main", "run_script"]

# Sub-commands by name. A script that happens to be called like one is started as ./NAME.
COMMANDS: dict[str, click.Command] = {}

_HOSTS = re.compile(r"[^\s:,]+:[1-9]\d*(,[^\s:,]+:[1-9]\d*)*")
_THIS_MACHINE = ("localhost", "127.0.0.1")


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the console script; ends the process with the job's exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    name = arguments[0] if arguments else ""
    command = COMMANDS.get(name)
    if command is not None and not Path(name).exists():
        command.main(arguments[1:], prog_name=f"npu-run {name}")
    run_script.main(arguments, prog_name="npu-run")


@click.command(
    # The first word that is no option is the script; whatever follows is the script's own, options included.
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]},
    options_metavar="[-np N] [-H HOST:SLOTS,...]",
    epilog="Options of npu-run come before SCRIPT; everything after it is passed to the script.",
)
@click.option(
    "-np",
    "size",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of ranks. Default: 1, or all the slots of -H.",
)
@click.option("-H", "hosts", metavar="HOST:SLOTS,...", help="Hosts to start ranks on, for example h1:4,h2:4.")
@click.option("--verbose", is_flag=True, help="Say what is started.")
@click.version_option(__version__, prog_name="npu-run")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
def run_script(size: int | None, hosts: str | None, verbose: bool, script: str, arguments: tuple[str, ...]):
    """Runs the Python file SCRIPT on N ranks, with RANK_ID, RANK_SIZE and DEVICE_ID set for each.

    One rank runs as a plain process, without Horovod. When a rank fails, the others are stopped, and the last
    lines tell which rank it was and how it ended; its exit code is that of npu-run.
    """
    try:
        _check_script(script)
        slots = _slots(hosts)
        size = size or sum(slots.values()) or 1
        if slots and size > sum(slots.values()):
            raise LaunchError(f"-np {size} is more than -H {hosts} offers. Name more slots or a smaller -np.")
        if verbose:
            click.echo(f"npu-run: {size} rank(s) of {script} on {hosts or 'this machine'}", err=True)
        sys.stdout.flush()
        if any(host not in _THIS_MACHINE for host in slots):
            _run_on_hosts(script, list(arguments), size, hosts, verbose)
        if size == 1:
            _run_alone(script, list(arguments))
        code = run_local_ranks(script, list(arguments), size)
    except LaunchError as error:
        click.echo(f"npu-run: {error}", err=True)
        code = 2
    sys.exit(code)


def _check_script(script: str) -> None:
    if os.path.isfile(script):
        return
    if re.fullmatch(r"python[\d.]*", os.path.basename(script)):
        raise LaunchError("name the script alone, without python before it: npu-run -np 2 train.py")
    known = f" Commands of npu-run are {', '.join(sorted(COMMANDS))}." if COMMANDS else ""
    raise LaunchError(
        f"there is no file {script!r} to run. Expected a Python script, then its arguments.{known}"
    )


def _slots(hosts: str | None) -> dict[str, int]:
    """Slots by host, in the order given; empty without -H."""
    if hosts is None:
        return {}
    if not _HOSTS.fullmatch(hosts):
        raise LaunchError(
            f"-H is not understood. Expected host:slots,host:slots with slots >= 1; got {hosts!r}."
        )
    pairs = [entry.split(":") for entry in hosts.split(",")]
    if len({host for host, _ in pairs}) < len(pairs):
        raise LaunchError(
            f"-H names a host twice. Expected each host once with all its slots; got {hosts!r}."
        )
    return {host: int(slots) for host, slots in pairs}


def _run_alone(script: str, arguments: list[str]) -> None:
    """Becomes the script's process: signals, terminal and exit code are then the script's own."""
    # How the cores are used is nobody's business but the script's when it has them all.
    quiet = {name: text for name, text in rank_defaults(1).items() if name == "TF_CPP_MIN_LOG_LEVEL"}
    os.execve(sys.executable, rank_command(script, arguments), {**quiet, **os.environ})


def _run_on_hosts(script: str, arguments: list[str], size: int, hosts: str, verbose: bool) -> None:
    """Becomes Horovod's own launcher, which reaches the other hosts through ssh."""
    options = ["-np", str(size), "-H", hosts, "--gloo", *(["--verbose"] if verbose else [])]
    command = [sys.executable, "-m", "horovod.runner.launch", *options, *rank_command(script, arguments)]
    os.execv(sys.executable, command)
