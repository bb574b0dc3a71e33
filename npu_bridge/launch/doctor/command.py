"""`npu-run doctor`: one page that says whether a run would work here, ready to be pasted into a report."""

from __future__ import annotations

import contextlib
import sys

import click

from npu_bridge.base.environment import read_variable, write_variable
from npu_bridge.launch.command_line import SETTINGS, Command
from npu_bridge.launch.doctor.machine import machine_section, versions_section
from npu_bridge.launch.doctor.options import config_section, environment_section, rank_table_section
from npu_bridge.launch.doctor.page import Page, Problem, Section, print_page
from npu_bridge.launch.doctor.ranks import Trial, horovod_section, run_trial
from npu_bridge.launch.table import PlainConsole

__all__ = ["doctor", "examine"]


@click.command(cls=Command, context_settings=SETTINGS)
@click.option("--config", metavar="FILE", help="A configuration file (TOML): what would it do here?")
@click.option("--rank-table", metavar="FILE", help="A rank table (JSON): is it right, and which servers are here?")
@click.option(
    "--limit-secs",
    type=click.FloatRange(min=1),
    default=120.0,
    show_default=True,
    help="Time each of the two trial runs may take.",
)
def doctor(config: str | None, rank_table: str | None, limit_secs: float):
    """Says what is installed, what the machine can do, what is set, and whether ranks can be started.

    Starts one and two processes that really sum a tensor. The exit code is 1 when a run could not work, else 0.
    """
    console = PlainConsole()
    with console.status("starting ranks") if console.is_terminal else contextlib.nullcontext():
        page = examine(config, rank_table, limit_secs)
    print_page(page, console)
    sys.exit(page.exit_code)


def examine(config: str | None, rank_table: str | None, limit_secs: float) -> Page:
    """Looks at everything; never raises because of what it finds.

    Args:
      config: a configuration file to read, or None.
      rank_table: a rank table to read, or None.
      limit_secs: time each of the two trial runs may take.
    """
    page = Page()
    page.add(*versions_section())
    variables, problems, wanted_ranks = environment_section()
    table = Section("", []), [], 1
    if rank_table is not None:
        table = rank_table_section(rank_table)
        wanted_ranks = max(wanted_ranks, table[2])
    one = run_trial(1, limit_secs)
    two = None if one.failure or one.facts.get("horovod_is_missing") else run_trial(2, limit_secs)
    page.add(machine_section(one.facts.get("gpus")))
    page.add(*horovod_section(one, two, wanted_ranks))
    page.add(variables, problems)
    page.add(*table[:2])
    if config is not None:
        page.add(*_config(config, one))
    return page


def _config(path: str, trial: Trial) -> tuple[Section, list[Problem]]:
    if "tensorflow" not in trial.facts:
        return Section("", []), [Problem(f"{path} was not read: that needs TensorFlow")]
    if read_variable("TF_CPP_MIN_LOG_LEVEL") is None:
        write_variable("TF_CPP_MIN_LOG_LEVEL", 2)
    return config_section(path)
