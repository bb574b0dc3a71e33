"""Records what only the training process knows: how and where it was started, and with which options.

It writes `report.json` in the run folder, and `run.toml` with the changed options, for another run. Values of arguments
and variables whose names look like secrets are left out, as the page is meant to be passed on.
"""

from __future__ import annotations

import collections
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from npu_bridge.base import environment
from npu_bridge.base.files import make_local_folder, write_atomically
from npu_bridge.base.inventory import machine_rows, version_rows
from npu_bridge.base.reading import read_json
from npu_bridge.options import OPTIONS
from npu_bridge.options.as_toml import OPTIONS_FILE, OPTIONS_FILES, as_toml
from npu_bridge.options.environment_table import VARIABLES

FACTS_FILE = "report.json"
_FILES = rb'^\{\n "script": .*\n "command": '  # how these files begin
_SECRETS = {"apikey", "credential", "credentials", "key", "passphrase", "passwd", "password", "secret", "token"}
_LEFT_OUT = "***"
_VALUE_CHARACTERS, _SHOWN_CHARACTERS = 200, 60  # of a value: on the page, and in tables of commands


def note_run(
    folder: str,
    history: str,
    options: Mapping[str, Any] | None = None,
    ranks: Sequence[Mapping[str, Any]] = (),
    gpus: Sequence[str] | None = None,
) -> None:
    """Writes `report.json` into a run folder; the file is replaced as a whole.

    Args:
      folder: the run folder, created if missing.
      history: path of the file with the steps.
      options: the options of the training (a `TrainingOptions`); None if not known.
      ranks: the facts of each rank, in order, such as `host` and `cores`.
      gpus: the GPUs that TensorFlow sees; None if not known.
    Raises:
      OSError: the file cannot be written, or another program wrote it.
    """
    hosts = [str(rank["host"]) for rank in ranks if "host" in rank]
    by_launcher = environment.read_variable("RANK_SIZE") is not None
    facts = {
        "script": os.path.basename(sys.argv[0]) if sys.argv else "",
        "command": command_line(sys.argv, max(len(ranks), 1), hosts, by_launcher),
        "folder": os.getcwd(),
        "began": round(time.time(), 3),
        "history": os.path.relpath(history, folder),
        "options": None if options is None else _changed_options(options),
        "variables": list_set_variables(_VALUE_CHARACTERS),
        "environment": [*version_rows(), *machine_rows(None if gpus is None else list(gpus))],
        "ranks": [dict(rank) for rank in ranks],
    }
    make_local_folder(folder)
    write_atomically(os.path.join(folder, FACTS_FILE), json.dumps(facts, indent=1), _FILES)


def note_options(folder: str, config: Any, options: Mapping[str, Any] | None) -> None:
    """Writes `run.toml` into a run folder; `config` and `options` as in `as_toml`. The file is replaced as a whole.

    Raises:
      OSError: the file cannot be written, or another program wrote it.
    """
    make_local_folder(folder)
    write_atomically(os.path.join(folder, OPTIONS_FILE), as_toml(config, options), OPTIONS_FILES)


def note_failure(folder: str, failure: Mapping[str, Any]) -> bool:
    """Adds a failure to `report.json` of a running training; the file is replaced as a whole.

    A secondary failure, which another rank caused, never replaces an earlier one. A primary failure is never replaced.

    Returns:
      False if there is no such file, or it keeps its earlier failure.
    Raises:
      OSError: the file cannot be written.
    """
    try:
        facts = read_json(FACTS_FILE, within_folder=folder)
    except FileNotFoundError:
        return False
    known = facts.get("failure")
    if known and (failure["secondary"] or not known.get("secondary")):
        return False
    write_atomically(os.path.join(folder, FACTS_FILE), json.dumps({**facts, "failure": failure}, indent=1), _FILES)
    return True


def command_line(arguments: Sequence[str], ranks: int, hosts: Sequence[str] = (), by_launcher: bool = True) -> str:
    """Returns the command that starts a training like this one; empty if no script was started.

    Args:
      arguments: the script and its arguments.
      ranks: the number of ranks.
      hosts: host of each rank, in order; different hosts become an option of the command.
      by_launcher: whether a single rank is also started by npu-run.
    """
    if not arguments or not os.path.isfile(arguments[0]):
        return ""
    start = ["python"]
    if ranks > 1 or by_launcher:
        start = ["npu-run", "-np", str(ranks)] if ranks > 1 else ["npu-run"]
        if len(set(hosts)) > 1:
            start += ["-H", ",".join(f"{host}:{count}" for host, count in collections.Counter(hosts).items())]
        start += [word for setting in environment.launcher_settings() for word in ("--set", setting)]
    return shlex.join([*start, *_mask_secrets(arguments)])


def _mask_secrets(arguments: Sequence[str]) -> list[str]:
    shown, hides_next = [], False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if hides_next and not argument.startswith("-"):
            argument, hides_next = _LEFT_OUT, False
        elif (equals or name.startswith("-")) and _is_secret(name):
            hides_next = not equals
            argument = f"{name}={_LEFT_OUT}" if equals else argument
        else:
            hides_next = False
        shown.append(argument)
    return shown


def _is_secret(name: str) -> bool:
    words = re.findall(r"[A-Z]*[a-z0-9]+|[A-Z]+", name)  # also of accessToken
    return any(word.lower() in _SECRETS for word in words)


def _changed_options(options: Mapping[str, Any]) -> list[list[str]]:
    """Returns the options that differ from their defaults: owner and name, value, default, and effect here."""
    rows = []
    for option in OPTIONS:
        value = options.get(option.name)
        if not option.has_plain_value or value is None or value in (option.default, option.absent):
            continue
        rows.append(
            [
                f"{option.owner}.{option.name}",
                shorten_value(repr(value), _VALUE_CHARACTERS),
                shorten_value(repr(option.default), _VALUE_CHARACTERS),
                option.effect.in_words,
            ]
        )
    return rows


def list_set_variables(most_characters: int = _SHOWN_CHARACTERS) -> list[tuple[str, str, str]]:
    """Returns name, shortened value and effect here of each documented environment variable that is set."""
    return [
        (v.name, shorten_value(v.value, most_characters), v.effect.in_words) for v in VARIABLES if v.value is not None
    ]


def shorten_value(text: str, most_characters: int = _SHOWN_CHARACTERS) -> str:
    """Returns a text, or its beginning and three dots."""
    return text if len(text) <= most_characters else f"{text[:most_characters]}..."
