"""`npu-run report`: makes one HTML page about a training."""

from __future__ import annotations

import os

import click

from npu_bridge.base.terminal import echo, path_for_message
from npu_run.command_line import Command, exit_on_errors
from npu_run.errors import LaunchError
from npu_run.outputs import check_output_file


@click.command(cls=Command)
@click.argument("folder")
@click.option("-o", "--out", metavar="FILE", help="The page. Default: FOLDER/report.html.")
@click.option(
    "--timeline",
    metavar="DIR",
    help="Folder that npu-run --timeline wrote to. Default: FOLDER or FOLDER/timeline, if it is there.",
)
def report(folder: str, out: str | None, timeline: str | None):
    """Makes report.html of the training in FOLDER: curves, options, ranks, environment, how to repeat it.

    The page needs no other file and no network. Every NPUEstimator makes this page when a training ends;
    docs/reporting.md shows how to make it for other trainings.
    """
    from npu_bridge.reporting.page import PAGE_FILE, PAGE_FILES, write_page
    from npu_bridge.reporting.page.run_folder import NoRunError

    with exit_on_errors(LaunchError, NoRunError, OSError):
        if out is not None or os.path.isdir(folder):
            check_output_file(out or os.path.join(folder, PAGE_FILE), "--out", PAGE_FILES)
        made = write_page(folder, out, timeline)
    echo(f"{path_for_message(made)} ({os.path.getsize(made) / 1000:.0f} kB)")
