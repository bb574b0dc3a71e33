"""`npu-run effects`: lists the options that a script, configuration file or training sets, and their effects here."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Callable, NamedTuple

from npu_bridge.base.errors import nearest_word
from npu_bridge.base.reading import open_file, read_json
from npu_bridge.base.terminal import echo, escape_in_line
from npu_bridge.options import OPTIONS
from npu_bridge.options.table import IN_OBJECT, RUN_CONFIG, Effect, Option
from npu_bridge.reporting.page.facts import FACTS_FILE, shorten_value
from npu_run.command_line import is_quiet, make_command_reading_script
from npu_run.errors import LaunchError
from npu_run.table import PlainConsole, print_table
from npu_run.tensorflow_choice import TensorFlowChoice

WORDS = {"works": "works", "recorded": "no effect", "refused": "refused"}  # for the levels of `Effect`
_TITLES = {"refused": "refused: they end a training at its start", "no effect": "no effect here", "works": "work here"}
_FROM_FILE = re.compile(r"""\bfrom_file\(\s*['"]([^'"]+)['"]""")


class OptionRow(NamedTuple):
    """An option that is set.

    Attributes:
      name: the name of the option, with its owner.
      value: the value as Python code; "" if only a run could show it.
      default: the default as Python code; "" if unknown.
      effect: "works", "no effect" or "refused".
      note: explains the effect.
      place: file and line of a script; "" elsewhere.
    """

    name: str
    value: str
    default: str
    effect: str
    note: str
    place: str = ""


@functools.partial(make_command_reading_script, file_endings=(".py", ".toml"))
def effects(
    choice: TensorFlowChoice, script: str, arguments: tuple[str, ...]
) -> tuple[int, dict[str, Any], Callable[[], None]]:
    """Lists every option that is set, and its effect here: works, no effect, or refused.

    SCRIPT is a Python script, which is read but not run; a TOML file for NPURunConfig.from_file; or the folder of a
    training, which has the values that were in force. The exit code is 1 if an option is refused.
    """
    rows = list(_list_rows(script, choice))
    code = int(any(row.effect == "refused" for row in rows))
    counts = {word: sum(row.effect == word for row in rows) for word in _TITLES}
    facts = {"source": script, "counts": counts, "options": [row._asdict() for row in rows]}
    return code, facts, functools.partial(_print_rows, script, rows, counts)


def _print_rows(script: str, rows: Sequence[OptionRow], counts: Mapping[str, int]) -> None:
    console = PlainConsole()
    for word, title in _TITLES.items():
        shown = [_table_cells(row) for row in rows if row.effect == word and not (word == "works" and is_quiet())]
        if not any(value for _, value, _ in shown):
            shown = [(name, note) for name, _, note in shown]
        if shown:
            print_table(shown, console, title)
    if not rows and script.endswith(".py"):
        echo("A script shows only the values written in it. For all values, give the model folder of a training.")
    words = {"works": "work", "no effect": "without effect", "refused": "refused"}
    told = ", ".join(f"{counts[effect]} {word}" for effect, word in words.items() if counts[effect])
    options = f"{len(rows)} option{'' if len(rows) == 1 else 's'}"
    echo(f"{escape_in_line(script)}: {options} set{f': {told}' if told else ''}.")


def _table_cells(row: OptionRow) -> tuple[str, ...]:
    return (f"{row.place}: {row.name}" if row.place else row.name, shorten_value(row.value), row.note)


def _list_rows(path: str, choice: TensorFlowChoice) -> Iterator[OptionRow]:
    if os.path.isdir(path):
        return _read_rows_of_training(path)
    if path.endswith(".toml"):
        return _rows_of_file(path)
    return _rows_of_script(path, choice)


def _rows_of_file(path: str) -> Iterator[OptionRow]:
    """Yields a row for each option in a configuration file, in the order of the file; does not need TensorFlow.

    Raises:
      OSError, ValueError: the file cannot be read, or is not TOML.
    """
    from npu_bridge.options.config_file import read_toml

    return _rows_of_table(read_toml(path)[0], RUN_CONFIG)


def _rows_of_table(content: Mapping[str, Any], owner: str) -> Iterator[OptionRow]:
    names = [option.name for option in OPTIONS.options_of(owner)]
    for name, value in content.items():
        kind = OPTIONS[name].kind if name in names else None
        if hasattr(kind, "owner") and isinstance(value, dict):
            yield from _rows_of_table(value, kind.owner)
        elif kind is not None:
            yield _make_row(OPTIONS[name], value)
        elif name != "stages":
            near = nearest_word(name, names)
            note = f"not an option{f'; did you mean {near}?' if near else ''}"
            yield OptionRow(f"{owner}.{name}", repr(value), "", "refused", note)


def _make_row(option: Option, value: Any) -> OptionRow:
    effect = option.effect
    try:
        option.check(value, IN_OBJECT)
    except (TypeError, ValueError) as error:
        effect = Effect("refused", str(error))
    else:
        if effect.level == "refused" and value == option.default:
            effect = Effect("recorded", "It is the default; any other value is refused.")
    note = effect.note or _default_note(effect.level)
    return OptionRow(f"{option.owner}.{option.name}", repr(value), repr(option.default), WORDS[effect.level], note)


def _default_note(level: str) -> str:
    return {"works": "as documented", "recorded": "checked and kept", "refused": "any value but the default"}[level]


def _rows_of_script(path: str, choice: TensorFlowChoice) -> Iterator[OptionRow]:
    known = {name: option for option in OPTIONS for name in (option.name, option.key) if name}
    for finding in choice.survey_script(path).findings:
        kind, _, name = finding.what.partition(" ")
        if kind != "option":
            continue
        option, place = known.get(name), str(finding.place)
        if finding.is_fatal:
            owner = f"{option.owner}." if option is not None else ""
            yield OptionRow(f"{owner}{name}", "", "", "refused", finding.remark, place)
        elif option is None:
            yield OptionRow(name, "", "", "no effect", finding.remark, place)
        else:
            level, note = option.effect
            row = (f"{option.owner}.{option.name}", "", repr(option.default))
            yield OptionRow(*row, WORDS[level], note or _default_note(level), place)

    with open_file(path, errors="replace") as text:
        named = _FROM_FILE.findall(text.read())
    for file in named:
        if os.path.isfile(file):
            yield from (row._replace(place=file) for row in _rows_of_file(file))


def _read_rows_of_training(folder: str) -> Iterator[OptionRow]:
    try:
        listed = read_json(FACTS_FILE, within_folder=folder)["options"] or []
        rows = [(*map(str, (name, value, default, said)),) for name, value, default, said in listed]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LaunchError(
            f"{os.path.join(folder, FACTS_FILE)} does not hold a training's options ({error}). Expected the folder of "
            f"a training of NPUEstimator; name this folder, the script, or the configuration file."
        ) from error
    for name, value, default, said in rows:
        level, _, note = said.partition(": ")
        yield OptionRow(name, value, default, WORDS.get(level, "works"), note or _default_note(level))
