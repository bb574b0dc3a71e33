"""`npu-run check script.py`, the command: whether a script can work here, without running it."""

from __future__ import annotations

import json
import os
import sys

import click

from npu_bridge.base.terminal import echo, json_text
from npu_bridge.launch.check_page import facts_of, make_page
from npu_bridge.launch.command_line import SETTINGS, Command
from npu_bridge.launch.source_choice import SourceChoice

__all__ = ["check"]


@click.command(cls=Command, context_settings=SETTINGS)
@click.option("--tf1", "era", flag_value=1, type=int, help="The script is one of TensorFlow 1.")
@click.option("--tf2", "era", flag_value=2, type=int, help="The script is one of TensorFlow 2.")
@click.option("--tree", "trees", multiple=True, metavar="DIR", help="Modules in DIR are the script's own, too.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
def check(era: int | None, trees: tuple[str, ...], as_json: bool, script: str) -> None:
    """Reads SCRIPT and the modules of its folder that it imports, without running any of it.

    Says with file and line which names and options it uses, what they are here, and what cannot work. The exit code
    is 1 if something cannot.
    """
    choice = SourceChoice(era or 0, tuple(map(os.path.abspath, trees)))
    found = choice.survey(script)
    echo(json_text(json.dumps(facts_of(script, found), indent=1)) if as_json else make_page(script, found))
    sys.exit(int(any(finding.is_fatal for finding in found.findings)))
