"""Lists the commands of `npu-run` in groups, and suggests similar names for a mistyped command or script.

To add a command, add its line of the help here and a module of its name in this folder.
"""

from __future__ import annotations

import importlib
import os
import re

import click

from npu_bridge.base.errors import nearest_word

GROUPS = {
    "Before a training": {
        "doctor": "whether a run would work on this machine, and the cures",
        "check": "the names that a script uses, and those that cannot work here",
        "try": "the first steps of a training, in a temporary folder",
        "effects": "the effect here of each option that is set",
        "explain": "the stages that a configuration file adds to a step",
        "plan": "how fast a training would be on other numbers of ranks",
    },
    "After a training": {
        "report": "one page about a training",
        "compare": "whether two trainings agree, and where they begin to differ",
    },
    "When two trainings differ": {
        "record": "save how a training starts: weights, batches, random numbers",
        "replay": "train from such a start, and compare bit for bit",
        "bisect": "which operators must stay float32 in low precision",
    },
    "In your shell": {
        "completion": "completes commands, options and scripts in bash, zsh and fish",
    },
}
# Of commands that are not in the module of their name.
_MODULES = {
    "doctor": "doctor.command",
    "try": "try_",
    "plan": "predict.command",
    "compare": "compare.command",
    "replay": "record",
}
COMMANDS = {name: f"{__package__}.{_MODULES.get(name, name)}" for group in GROUPS.values() for name in group}


def find_command(name: str) -> click.Command:
    """Imports a command of `COMMANDS` by name and returns it."""
    return getattr(importlib.import_module(COMMANDS[name]), name)


def describe_missing_script(word: str) -> str:
    """Returns the message for a missing script, with the most similar command or file name."""
    if re.fullmatch(r"python[\d.]*", os.path.basename(word)):
        return "name the script alone, without python before it: npu-run -np 2 train.py"
    if word in COMMANDS:
        return f"there is no file {word!r} to run. A command comes before its options: npu-run {word} ..."
    near = nearest_word(word, COMMANDS)
    if near and not word.endswith(".py"):
        return f"there is no command {word!r} and no such file: did you mean {near}?"
    folder, name = os.path.split(word)
    near = nearest_word(name, _scripts_in(folder or "."))
    if near:
        return f"there is no file {word!r} to run: did you mean {os.path.join(folder, near)}?"
    return (
        f"there is no file {word!r} to run. Expected a Python script, then its arguments. Commands of npu-run are "
        f"{', '.join(sorted(COMMANDS))}."
    )


def _scripts_in(folder: str) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if name.endswith(".py")]
    except OSError:
        return []
