"""`npu-run doctor`: one page that says whether a run would work here, ready to be pasted into a report."""

from __future__ import annotations

import sys

import click

__all__ = ["doctor"]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
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
    # Starting a script must not wait for what only the doctor needs.
    from rich.console import Console

    from npu_bridge.launch.doctor_examination import examine
    from npu_bridge.launch.doctor_page import print_page

    console = Console(highlight=False)
    if console.is_terminal:
        with console.status("starting ranks"):
            page = examine(config, rank_table, limit_secs)
    else:
        page = examine(config, rank_table, limit_secs)
    print_page(page, console)
    sys.exit(page.exit_code)
