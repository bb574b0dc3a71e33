"""Implements `npu-run --set NAME=VALUE`: sets options of every `NPURunConfig` in a run, whatever the script sets.

The launcher checks names and values, and passes them to the ranks in an environment variable.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from npu_bridge.base import environment
from npu_bridge.base.errors import say_on_terminal, shortened
from npu_bridge.base.terminal import escape_in_line
from npu_bridge.options.catalogue import OPTIONS
from npu_bridge.options.config_file import LONGEST_LINE, TomlReader, parse_toml
from npu_bridge.options.kinds import Directory, HelperObject, StringifiedValue, Text
from npu_bridge.options.table import IN_OBJECT, RUN_CONFIG

_PYTHON_WORDS = {"True": True, "False": False}
# Options whose values are texts, also if these look like numbers or JSON.
_TEXT_OPTIONS = {option.name for option in OPTIONS if isinstance(option.kind, (Directory, StringifiedValue, Text))}


def pass_settings_to_ranks(assignments: Sequence[str]) -> None:
    """Checks the settings, and passes them to the ranks in an environment variable.

    Args:
      assignments: settings in the form `NAME=VALUE`, where VALUE is TOML; a VALUE that is not TOML becomes text.
    Raises:
      TypeError, ValueError: a name is unknown, or a value is illegal by itself; the message begins with `--set`.
    """
    helpers = {
        o.kind.owner: functools.partial(_check_values, o.kind.owner)
        for o in OPTIONS
        if isinstance(o.kind, HelperObject)
    }
    for word in assignments:
        reader = TomlReader(_error_prefix(word), "", helpers)
        values = reader.constructor_values(RUN_CONFIG, _parse_assignment(word), "")
        try:
            _check_values(RUN_CONFIG, **values)
        except (TypeError, ValueError) as error:
            raise _add_setting_location(error, word) from error
    environment.write_variable(environment.SETTINGS, json.dumps(list(assignments)))
    environment.write_variable(environment.SETTINGS_READ, 0)


@contextlib.contextmanager
def apply_settings(values: Mapping[str, Any], helpers: Mapping[str, type]) -> Iterator[dict[str, Any]]:
    """Overrides the values with which an `NPURunConfig` is made, in the block of this context manager.

    After the block, rank 0 prints, once for each place in the script, which NPURunConfig was changed.

    Args:
      values: constructor values, by parameter.
      helpers: the helper classes by owner name.
    Yields:
      The values, overridden by the settings.
    Raises:
      TypeError, ValueError: a setting gives an illegal value, or causes an error in the block; the message begins with
        `--set`.
    """
    words = environment.launcher_settings()
    changed, word = dict(values), ""
    try:
        for word in words:
            changed.update(_merge_settings(RUN_CONFIG, changed, _parse_assignment(word), helpers))
    except (TypeError, ValueError) as error:
        raise _add_setting_location(error, word) from error
    try:
        yield changed
    except (TypeError, ValueError) as error:
        option = getattr(error, "option", None)
        failing_word = next((word for word in words if option in _list_nested_names(_parse_assignment(word))), None)
        if failing_word is None:
            raise
        raise _add_setting_location(error, failing_word) from error
    if words:
        environment.write_variable(environment.SETTINGS_READ, 1)
        if environment.probable_rank() == 0:
            say_on_terminal(
                f"npu-run: the NPURunConfig of {escape_in_line(_find_script_line())} takes {_format_settings(words)}"
            )


def report_unread_settings() -> None:
    """Reports, at the end of the script, settings that no NPURunConfig has read."""
    words = environment.launcher_settings()
    if words and not environment.is_flag_on(environment.SETTINGS_READ) and environment.probable_rank() == 0:
        said = f"{_format_settings(words)} changed nothing: the script has made no NPURunConfig"
        say_on_terminal(f"npu-run: {said}. Make one, or set the option where the script sets its options.")


def _parse_assignment(assignment: str) -> dict[str, Any]:
    """Parses `NAME=VALUE` into the form that a parsed TOML file has."""
    name, equals, text = assignment.partition("=")
    name, text = name.strip(), text.strip()
    if not equals or not name or len(assignment) > LONGEST_LINE or "\n" in assignment:
        raise ValueError(
            f"{_error_prefix(assignment)}: Expected NAME=VALUE in one line, such as --set save_checkpoints_steps=50."
        )
    if text == "None":
        raise ValueError(
            f"{_error_prefix(assignment)}: None cannot be set here. Leave {name} out, or change it in the script."
        )
    is_of_texts = name.rpartition(".")[2] in _TEXT_OPTIONS
    try:
        if not is_of_texts or text[:1] in ("", '"', "'"):
            return parse_toml(f"{name} = {text}", _error_prefix(assignment))
    except ValueError:
        if is_of_texts or text[:1] in ("", '"', "'", "[", "{", "#"):
            raise
    # The shell removes quotes, and users write Python's words.
    value = text if is_of_texts else _PYTHON_WORDS.get(text, text)
    return parse_toml(f"{name} = {json.dumps(value, ensure_ascii=False)}", _error_prefix(assignment))


def _check_values(owner: str, **values: Any) -> None:
    for option in OPTIONS.options_of(owner):
        if option.name in values:
            option.check(values[option.name], IN_OBJECT)


def _add_setting_location(error: Exception, assignment: str) -> Exception:
    return TomlReader(_error_prefix(assignment), "", {}).add_location(error, "")


def _list_nested_names(content: Mapping[str, Any]) -> Iterator[str]:
    for name, value in content.items():
        yield name
        yield from _list_nested_names(value) if isinstance(value, dict) else ()


def _merge_settings(
    owner: str, before: Mapping[str, Any], content: Mapping[str, Any], helpers: Mapping[str, type]
) -> dict[str, Any]:
    """Returns the settings in `content` by option name; a table becomes a copy of its helper object, with changes."""
    values = {}
    for name, value in content.items():
        kind = OPTIONS[name].kind
        if isinstance(kind, HelperObject):
            helper = before.get(name)
            options = () if helper is None else OPTIONS.options_of(kind.owner)
            own = {option.name: getattr(helper, option.attribute) for option in options}
            value = helpers[kind.owner](**{**own, **_merge_settings(kind.owner, own, value, helpers)})
        values[name] = value
    return values


def _error_prefix(assignment: str) -> str:
    return shortened(f"--set {assignment}", 120)


def _format_settings(assignments: Sequence[str]) -> str:
    return escape_in_line(" ".join(f"--set {shlex.quote(word)}" for word in assignments))


def _find_script_line() -> str:
    """Returns file and line of the script where a config object is made."""
    frame = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).split(".")[0] in ("npu_bridge", "contextlib"):
        frame = frame.f_back  # type: ignore[assignment]
    return "this process" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
