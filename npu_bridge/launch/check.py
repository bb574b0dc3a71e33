"""`npu-run check script.py`: what a script uses and whether it can work here, told in seconds without training."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

import click

from npu_bridge.base.terminal import echo, in_line, json_text
from npu_bridge.launch.command_line import SETTINGS, Command
from npu_bridge.launch.source_choice import SourceChoice

if TYPE_CHECKING:
    from tensorflow1_compat.findings import Finding, Survey
    from tensorflow1_compat.journal import Entry

__all__ = ["check", "facts_of", "page_of"]

_TITLES = {
    "cannot work": "cannot work here",
    "healed": "made to work in the script's own files",
    "contrib": "of TensorFlow 1.15, supplied by npu_bridge",
    "npu": "of the NPU interface",
    "option": "options that act here",
    "ignored": "differs from an NPU, or is left out",
    "met": "found while it ran",
}


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
    from tensorflow1_compat.findings import survey  # only now: every start of a script passes by here

    choice = SourceChoice(era or 0, tuple(map(os.path.abspath, trees)))
    found = survey(script, choice.roots_of(script), choice.era)
    echo(json_text(json.dumps(facts_of(script, found), indent=1)) if as_json else page_of(script, found))
    sys.exit(int(any(finding.is_fatal for finding in found.findings)))


def facts_of(script: str, found: Survey, entries: list[Entry] = ()) -> dict[str, Any]:
    """The same as plain data, for JSON."""
    return {
        "script": script,
        "tensorflow": found.era,
        "files": found.files,
        "findings": [_row(each) for each in found.findings],
        "met": [_row(each) for each in entries],
    }


def _row(each: Finding | Entry) -> dict[str, str]:
    return {"kind": each.kind, "what": each.what, "remark": each.remark, "place": str(each.place)}


def page_of(script: str, found: Survey, entries: list[Entry] = ()) -> str:
    """Lines for people: a block for each kind of finding, and a verdict."""
    lines = [f"{in_line(script)}: a script of TensorFlow {found.era}, {found.files} file(s) read"]
    blocks = {kind: [each for each in found.findings if each.kind == kind] for kind in _TITLES}
    for kind, title in _TITLES.items():
        rows = list(entries) if kind == "met" else blocks[kind]
        if rows:
            lines += ["", f"{title}:"]
            lines += [f"  {each.place}: {each.what}{f': {each.remark}' if each.remark else ''}" for each in rows]
    count = len(blocks["cannot work"])
    verdict = f"{count} name(s) or file(s) cannot work." if count else "Nothing was found that cannot work."
    return "\n".join([*lines, "", verdict])
