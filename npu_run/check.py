"""`npu-run check script.py`: the command line of the checks in `tensorflow1_compat/findings.py`."""

from __future__ import annotations

import json
import os
from typing import Any, Callable

import click

from npu_bridge.base.files import write_atomically
from npu_bridge.base.terminal import echo
from npu_run.check_page import findings_as_facts, format_findings
from npu_run.command_line import is_quiet, make_command_reading_script
from npu_run.errors import LaunchError
from npu_run.outputs import check_output_file
from npu_run.tensorflow_choice import REPORT_FILES, TensorFlowChoice


@make_command_reading_script
@click.option("--run", is_flag=True, help="Run SCRIPT, too, and list at its end the names it met.")
@click.option("-np", "size", type=click.IntRange(min=1), metavar="N", help="Number of ranks of --run. Default: 1.")
@click.option("-o", "--out", metavar="FILE", help="Write what was found to FILE, too (JSON).")
def check(
    run: bool, size: int | None, out: str | None, choice: TensorFlowChoice, script: str, arguments: tuple[str, ...]
) -> tuple[int, dict[str, Any], Callable[[], None]]:
    """Reads SCRIPT and the modules of its folder that it imports.

    Prints, with file and line, the names and options that the script uses and the effect of each here, and marks
    everything that cannot work. Runs the script, with ARGS, only with --run. The exit code is 1 if something cannot
    work; with --run, it is the exit code of the script.
    """
    check_output_file(out, "--out", REPORT_FILES)
    if run:
        if click.get_current_context().params["as_json"]:
            raise LaunchError(
                "--json cannot be used with --run: SCRIPT prints to the same output. Use --run --out FILE."
            )
        choice._replace(report=os.path.abspath(out) if out else "").announce()
        from npu_run.cli import run_script  # imported late: it imports most of the launcher

        words = [*["-q"] * is_quiet(), *([] if size is None else ["-np", str(size)]), script, *arguments]
        run_script.main(words, prog_name="npu-run")
    found = choice.survey_script(script)
    facts = findings_as_facts(script, found)
    if out is not None:
        write_atomically(out, json.dumps(facts, indent=1), REPORT_FILES)
    is_fatal = any(finding.is_fatal for finding in found.findings)
    return int(is_fatal), facts, lambda: echo(format_findings(script, found))
