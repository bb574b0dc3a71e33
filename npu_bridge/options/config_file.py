"""Reads run configurations from TOML files: a key for each constructor value, a table for each helper object."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Container, Mapping
from typing import Any, Callable

from npu_bridge.base.errors import message, shortened, shown
from npu_bridge.base.reading import open_file, unreadable_file_error, wrong_format_error
from npu_bridge.options.catalogue import OPTIONS
from npu_bridge.options.kinds import HelperObject, RawBytes, TensorFlowObject
from npu_bridge.options.table import RUN_CONFIG

# Parsing takes two seconds for each megabyte, and grows with the square of a line's length.
_MOST_BYTES, LONGEST_LINE, _MOST_DOTS = 64 * 2**10, 4096, 16
_BEGINNING = re.compile(r"""[\s\["'\w.-]*""")  # characters of a key or the name of a table
_TABLE_HEADER = re.compile(r"\s*\[([^\[\]]+)\]\s*(#.*)?$")
_LIST_HEADER = re.compile(r"\s*\[\[([^\[\]]+)\]\]\s*(#.*)?$")
_KEY = re.compile(r"""\s*["']?([A-Za-z0-9_.-]+)["']?\s*=""")


def build_from_file(
    cls: type,
    path: str | os.PathLike,
    overrides: Mapping[str, Any],
    helpers: Mapping[str, type],
    lists: Mapping[str, Callable[[Mapping[str, Any]], Any]],
) -> Any:
    """Builds a config object from a TOML file.

    Args:
      cls: `NPURunConfig` or a subclass.
      path: the file.
      overrides: constructor values that override the file.
      helpers: the helper classes by owner name.
      lists: lists of tables that a file can hold besides constructor values: for each name, a function that makes an
        object from a table. A list named `NAME` becomes the attribute `_NAME`, a tuple of objects; the parsed tables of
        all lists become the attribute `_tables`.
    Raises:
      TypeError, ValueError: the file is not TOML, names an unknown key, or holds an illegal value or combination; the
        message starts with file, line and key.
      OSError: the file cannot be read.
    """
    content, text = read_toml(path, f"{cls.__name__}.from_file")
    tables = {name: content[name] for name in lists if name in content}
    reader = TomlReader(os.fspath(path), text, helpers)
    made = {name: reader.make_objects(name, content.pop(name), make) for name, make in lists.items() if name in content}
    values = reader.constructor_values(RUN_CONFIG, content, "", skipped_keys=overrides)
    try:
        config = cls(**{**values, **overrides})
    except (TypeError, ValueError) as error:
        raise reader.add_location(error, "") from error
    for name, objects in made.items():
        setattr(config, f"_{name}", objects)
    config._tables = tables
    return config


def read_toml(path: str | os.PathLike, owner: str = "TOML file") -> tuple[dict[str, Any], str]:
    """Returns the parsed content and the text of a file; raises errors as `build_from_file` does for the file."""
    try:
        with open_file(path, "rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise unreadable_file_error(error, owner, path, "a TOML file") from None
    except TypeError:
        problem, got = "path is not a path", shown(path)
        raise TypeError(message(owner, problem, "a path", got, "Name a TOML file.")) from None
    if len(content) > _MOST_BYTES:
        bound = f"at most {_MOST_BYTES >> 10} KiB"
        raise ValueError(f"{path}: the file is too large. Expected {bound}; got more.")
    try:
        text = content.decode("utf-8-sig")  # some editors put a mark first
    except UnicodeDecodeError as error:
        line, got = content.count(b"\n", 0, error.start) + 1, f"the byte 0x{content[error.start]:02X}"
        raise ValueError(
            f"{path}:{line}: the line is not UTF-8. Expected UTF-8; got {got}. Save the file as UTF-8."
        ) from None
    for number, line in enumerate(text.splitlines(), start=1):
        dots = _BEGINNING.match(line).group().count(".")
        if len(line) > LONGEST_LINE or dots > _MOST_DOTS:
            bound = f"at most {LONGEST_LINE} characters, and a key of at most {_MOST_DOTS} dots"
            raise ValueError(
                f"{path}:{number}: the line is too long. Expected {bound}; got {len(line)} characters, {dots} dots."
            )
    return parse_toml(text, os.fspath(path)), text


class TomlReader:
    """A reader that turns parsed TOML into constructor values, and knows the line of each key.

    Args:
      path: the file, or another text that begins error messages.
      text: the text from which the TOML was parsed.
      helpers: the helper classes, or other functions with their arguments, by owner name.
    """

    def __init__(self, path: str, text: str, helpers: Mapping[str, type]):
        self._path = path
        self._lines = _key_lines(text)
        self._helpers = helpers

    def constructor_values(
        self, owner: str, content: Mapping[str, Any], section: str, skipped_keys: Container[str] = ()
    ) -> dict[str, Any]:
        """Returns the constructor values of an owner from its table; `section` is a prefix such as "dump_config."."""
        names = [option.name for option in OPTIONS.options_of(owner)]
        values = {}
        for key, value in content.items():
            if key not in names:
                raise self.add_location(OPTIONS.unknown_option_error(ValueError, owner, key), section)
            if key not in skipped_keys:
                values[key] = self._convert_value(key, value, section)
        return values

    def _convert_value(self, key: str, value: Any, section: str) -> Any:
        kind = OPTIONS[key].kind
        if isinstance(kind, HelperObject):
            if not isinstance(value, dict):
                place, expected = self._location(section + key), f"[{section}{key}] with {kind.owner}'s parameters"
                raise ValueError(message(place, f"{key} is not a table", expected, shown(value), "Write a table."))
            inner = f"{section}{key}."
            arguments = self.constructor_values(kind.owner, value, inner)
            try:
                return self._helpers[kind.owner](**arguments)
            except (TypeError, ValueError) as error:
                raise self.add_location(error, inner) from error
        if isinstance(kind, (TensorFlowObject, RawBytes)):
            place, fix = self._location(section + key), f"Pass the value as from_file(path, {key}=...)."
            raise ValueError(message(place, f"a file cannot hold {key}", f"no {key}", shown(value), fix))
        return value

    def make_objects(self, name: str, tables: Any, make: Callable[[Mapping[str, Any]], Any]) -> tuple:
        """Calls `make` for each table of the list `name`, and returns a tuple of the results."""
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            fix = f"Write [[{name}]] above each table."
            raise ValueError(
                message(self._location(name), f"{name} is not a list of tables", "tables", shown(tables), fix)
            )
        made = []
        for position, table in enumerate(tables):
            try:
                made.append(make(table))
            except (TypeError, ValueError) as error:
                raise self.add_location(error, f"{name}[{position}].") from error
        return tuple(made)

    def add_location(self, error: Exception, section: str) -> Exception:
        """Returns the error with file, line and key in front; an error that already has them is returned unchanged."""
        if getattr(error, "is_located", False):
            return error
        option = getattr(error, "option", None)
        in_file = next((k for k in (f"{section}{option}", self._find_key(option)) if k in self._lines), None)
        kind = TypeError if isinstance(error, TypeError) else ValueError  # subclasses can require more than a text
        located = kind(shortened(f"{self._location(in_file or section.rstrip('.'))}: {error}"))
        located.option = option  # type: ignore[attr-defined]
        located.is_located = True  # type: ignore[attr-defined]
        return located

    def _find_key(self, option: str | None) -> str | None:
        named = (key for key in self._lines if key.rpartition(".")[2] == option)
        # Keys of tables in a list are found by their full name only.
        return next((key for key in named if "[" not in key), None)

    def _location(self, key: str) -> str:
        line = self._lines.get(key) or self._lines.get(key.partition("[")[0])  # a list can be written in one line
        return ":".join(part for part in (self._path, str(line or ""), f" key {key}" if key else "") if part)


def parse_toml(text: str, path: str) -> dict[str, Any]:
    """Parses a text; messages of errors begin with `path`."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ValueError(f"{path}: brackets are nested too deeply. Expected tables and lists of options.") from error
    except ValueError as error:  # also for a number of thousands of digits
        raise wrong_format_error("TOML", error, "NPURunConfig", path, text) from None


def _key_lines(text: str) -> dict[str, int]:
    """Returns the line number of every key and table header by dotted name, such as `dump_config.dump_mode`.

    Tables of a list are numbered: `[[stages]]` is `stages[0]`, and the next one `stages[1]`.
    """
    lines: dict[str, int] = {}
    section = ""
    counted: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        header, of_list = _TABLE_HEADER.match(line), _LIST_HEADER.match(line)
        if header or of_list:
            name = (header or of_list).group(1).strip()
            if of_list:
                counted[name] = counted.get(name, -1) + 1
                name = f"{name}[{counted[name]}]"
            section = f"{name}."
            lines.setdefault(name, number)
            continue
        key = _KEY.match(line)
        if key:
            lines.setdefault(section + key.group(1), number)
    return lines
