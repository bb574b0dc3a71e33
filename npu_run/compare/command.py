"""`npu-run compare`: compares two trainings, and finds where they begin to differ."""

from __future__ import annotations

import os
import sys

import click

from npu_bridge.base.files import write_atomically
from npu_bridge.base.secondary_files import NonFatalOutput
from npu_bridge.base.terminal import echo, escape_in_line, path_for_message
from npu_bridge.reporting.page import PAGE_FILES
from npu_run.command_line import Command, add_json_option, print_json
from npu_run.errors import LaunchError
from npu_run.outputs import MADE_BY, check_output_file, claim_command_output


@click.command(cls=Command)
@click.argument("a")
@click.argument("b", required=False)
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(["losses", "tensors", "checkpoints"]),
    help="Compare this alone; may be given several times. Default: all that both folders have.",
)
@click.option("--tag", metavar="TAG", help="Name of the loss in event files. Default: any usual name.")
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0, min_open=True),
    metavar="NUMBER",
    help="Largest relative error of tensors. Default: by dtype, 1e-4 for float32.",
)
@click.option("--names", metavar="FILE", help="CSV with operators of A and their names in B, one pair a line.")
@click.option("-o", "--out", default="compare.html", metavar="FILE", help="The page. Default: compare.html.")
@add_json_option
@click.option(
    "--write-names",
    metavar="DIR",
    help="Compare nothing: write the dump in A to DIR as op_name.output_index.timestamp.npy.",
)
def compare(a, b, only, tag, tolerance, names, out, as_json, write_names):
    """Compares folder B with folder A: each holds a training, repeats of npu-run --repeat, or dumped tensors.

    The exit code is 0 if B agrees with A, 1 if it does not, and 2 if they cannot be compared. docs/compare.md describes
    the comparison.
    """
    from npu_run.compare.dumps import read_csv_pairs, read_dumps, write_named_outputs
    from npu_run.compare.folders import compare_folders
    from npu_run.compare.page import render_comparison
    from npu_run.compare.verdict import WORDS, NotComparableError

    try:
        if write_names is not None:
            with claim_command_output(write_names, "--write-names", "npu-run compare") as own:
                dump = max(read_dumps(a), key=lambda one: len(one.files))
                own.clear(*MADE_BY["npu-run compare"])
                count = write_named_outputs(dump, write_names)
            echo(f"{count} tensors of step {dump.key.step} are in {write_names}")
            return
        if b is None:
            raise click.UsageError("Missing argument 'B'.")
        check_output_file(out, "--out", PAGE_FILES)
        found = compare_folders(a, b, only, tag, tolerance, None if names is None else read_csv_pairs(names))
    except (NotComparableError, LaunchError, OSError) as error:
        if as_json:
            print_json(2, {"inside": None, "problem": str(error)})
        else:
            echo(f"cannot be told: {escape_in_line(str(error))}")
        sys.exit(2)
    written = NonFatalOutput(f"the page {out}", say=found.notes.append)
    is_written = written.attempt(write_atomically, out, render_comparison(found), PAGE_FILES)
    if as_json:
        print_json(found.exit_code, {**found.as_json_facts(), "page": os.path.abspath(out) if is_written else None})
    else:
        for verdict in found.verdicts:
            echo(f"{verdict.kind}: {WORDS[verdict.is_inside]}. {escape_in_line(verdict.sentence)}")
        for note in [*found.notes, *(note for verdict in found.verdicts for note in verdict.notes)]:
            echo(f"note: {escape_in_line(note)}")
        if is_written:
            echo(f"{path_for_message(out)} ({os.path.getsize(out) / 1000:.0f} kB)")
    sys.exit(found.exit_code)
