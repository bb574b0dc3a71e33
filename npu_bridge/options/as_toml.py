"""Writes as TOML, for `NPURunConfig.from_file`, the options that a training has changed from their defaults."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from npu_bridge.base.terminal import escape_in_line
from npu_bridge.options.catalogue import OPTIONS
from npu_bridge.options.config_file import LONGEST_LINE
from npu_bridge.options.construction import adjusted_defaults, changed_values
from npu_bridge.options.kinds import HelperObject
from npu_bridge.options.table import REQUIRED, RUN_CONFIG

OPTIONS_FILE = "run.toml"
_FIRST_LINE = "# Options that this training changed. NPURunConfig.from_file reads this file."
OPTIONS_FILES = rb"^# Options that this training changed\."  # the beginning of such files
_OF_SESSION = "# These are the options of its session, without parameters of tf.estimator.RunConfig such as model_dir."
_SHOWN_CHARACTERS = 60


def as_toml(config: Any = None, options: Mapping[str, Any] | None = None) -> str:
    """Returns the text of a file from which `NPURunConfig.from_file` makes the same configuration.

    A comment lists values that a file cannot hold: Python objects, None for an option whose default is not None, and
    very long texts.

    Args:
      config: an `NPURunConfig`.
      options: the options of a session, if there is no `config`; None if the session had no options.
    """
    lines, lost = [_FIRST_LINE], []
    if config is not None:
        values = _changed_config_values(config)
    else:
        values = _changed_option_values(options or {}, RUN_CONFIG)
        lines.append("# The session had no options." if options is None else _OF_SESSION)
    tables = []
    for section, name, value in _flatten(values, ""):
        if name == "":
            tables += ["", f"[{section}]"]
            continue
        line = _toml_line(name, value)
        if line is None:
            lost.append(f"#   {section}{'.' if section else ''}{name}: {escape_in_line(_describe_value(value))}")
        elif section:
            tables.append(line)
        else:
            lines.append(line)
    for name, each in getattr(config, "_tables", {}).items():
        for entry in each:
            tables += ["", f"[[{name}]]", *filter(None, (_toml_line(key, value) for key, value in entry.items()))]
    if lost:
        note = "# A file cannot hold the following. Pass them: NPURunConfig.from_file(path, NAME=...)"
        lines += ["", note, *lost]
    return "\n".join([*lines, *tables, ""])


def _changed_config_values(config: Any) -> dict[str, Any]:
    """Returns the changed values of a config object by name, with a dictionary for each helper object."""
    is_helper = config._declared_as != RUN_CONFIG
    values = changed_values(config, **({} if is_helper else adjusted_defaults(config)))
    return {
        name: _changed_config_values(value) if _can_be_toml_table(value) else value for name, value in values.items()
    }


def _can_be_toml_table(value: Any) -> bool:
    """Returns whether a value is a helper object that a file can hold: an object with all required values."""
    if not hasattr(value, "_declared_as"):
        return False
    required = [o for o in OPTIONS.options_of(value._declared_as) if o.default is REQUIRED]
    return all(getattr(value, option.attribute) is not None for option in required)


def _changed_option_values(options: Mapping[str, Any], owner: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for option in OPTIONS.options_of(owner):
        if isinstance(option.kind, HelperObject):
            inner = _changed_option_values(options, option.kind.owner)
            if inner:
                required = [each.name for each in OPTIONS.options_of(option.kind.owner) if each.default is REQUIRED]
                values[option.name] = {**{name: options.get(name) for name in required}, **inner}
        elif options.get(option.name) not in (None, option.default, option.absent):
            values[option.name] = options[option.name]
    return values


def _flatten(values: Mapping[str, Any], section: str) -> Iterator[tuple[str, str, Any]]:
    """Yields (section, name, value), inner tables last. A table begins with an entry whose name is empty."""
    for name, value in values.items():
        if not isinstance(value, dict):
            yield section, name, value
    for name, value in values.items():
        if isinstance(value, dict):
            inner = f"{section}.{name}" if section else name
            if not value or not all(isinstance(each, dict) for each in value.values()):
                yield inner, "", None
            yield from _flatten(value, inner)


def _toml_line(name: str, value: Any) -> str | None:
    """Returns a line of TOML; None if TOML cannot express the value."""
    text = _toml_value(value)
    line = f"{name} = {text}"
    return line if text is not None and len(line) <= LONGEST_LINE else None


def _toml_value(value: Any) -> str | None:
    if isinstance(value, int):
        return json.dumps(value)  # includes True, which is an int
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, (str, bytes, os.PathLike)):
        try:
            text = os.fsdecode(value)
            text.encode("utf-8")
        except UnicodeError:
            return None
        return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        parts = [_toml_value(each) for each in value]
        return None if None in parts else f"[{', '.join(parts)}]"  # type: ignore[arg-type]
    if isinstance(value, dict):
        pairs = {json.dumps(str(key)): _toml_value(each) for key, each in value.items()}
        made = ", ".join(f"{key} = {each}" for key, each in pairs.items())
        return None if None in pairs.values() else f"{{{made}}}"
    return None


def _describe_value(value: Any) -> str:
    text = repr(value) if value is None or isinstance(value, (str, bytes)) else type(value).__name__
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
