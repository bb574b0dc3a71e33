"""Defines and checks the dictionary for `boost.apply`: its sections, keys and defaults."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from npu_bridge.base.arguments import check_instance, is_number
from npu_bridge.base.errors import did_you_mean, message, option_error, shown
from npu_bridge.base.reading import read_text, unreadable_file_error, wrong_format_error
from npu_bridge.collective.fragments import are_ascending_positions

FEATURES = ("less_bn", "grad_freeze", "adasum", "grad_accumulation", "dim_reduce", "loss_scale_group")
# The features that each level turns on in the mode "auto".
LEVELS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"O0": (), "O1": ("less_bn", "grad_freeze"), "O2": ("less_bn", "grad_freeze", "adasum")}
)
MODES = ("auto", "manual", "enable_all", "disable_all")


def _make_minimum_check(minimum):
    return lambda value: type(value) is int and value >= minimum


def _is_number(value):
    return is_number(value) and math.isfinite(value)


def _is_path(value):
    return value is None or isinstance(value, (str, os.PathLike))


def _are_positions(value):
    if value is None:
        return True
    return isinstance(value, (list, tuple)) and are_ascending_positions(value)


@dataclasses.dataclass(frozen=True)
class SectionKey:
    """A key of a section.

    Attributes:
      default: the value if the dictionary lacks the key.
      is_allowed: a function that returns whether a value is allowed.
      expected: the allowed values in words.
    """

    default: Any
    is_allowed: Any
    expected: str


_FLAG = (False, lambda value: isinstance(value, bool), "True or False")
SECTIONS: Mapping[str, Mapping[str, SectionKey]] = MappingProxyType(
    {
        "boost": {
            "mode": SectionKey("auto", lambda value: value in MODES, f"one of {', '.join(MODES)}"),
            **{feature: SectionKey(*_FLAG) for feature in FEATURES},
        },
        "common": {
            "gradient_split_groups": SectionKey(None, _are_positions, "a list of ascending positions of at least 1"),
            "device_number": SectionKey(8, _make_minimum_check(1), "a whole number of at least 1"),
        },
        "less_bn": {"fn_flag": SectionKey(True, *_FLAG[1:]), "gc_flag": SectionKey(True, *_FLAG[1:])},
        "grad_freeze": {
            "param_groups": SectionKey(10, _make_minimum_check(1), "a whole number of at least 1"),
            "freeze_type": SectionKey(1, lambda value: type(value) is int and value in (0, 1), "0 or 1"),
            "freeze_p": SectionKey(
                0.7, lambda value: _is_number(value) and 0 < value <= 1, "a number above 0, at most 1"
            ),
            "total_steps": SectionKey(65536, _make_minimum_check(1), "a whole number of at least 1"),
        },
        "grad_accumulation": {
            "grad_accumulation_step": SectionKey(1, _make_minimum_check(1), "a whole number of at least 1")
        },
        "dim_reduce": {
            "rho": SectionKey(0.55, lambda value: _is_number(value) and 0 < value < 1, "a number above 0, below 1"),
            "gamma": SectionKey(0.9, lambda value: _is_number(value) and 0 <= value < 1, "a number from 0, below 1"),
            "alpha": SectionKey(0.001, lambda value: _is_number(value) and value >= 0, "a number of at least 0"),
            "sigma": SectionKey(0.4, lambda value: _is_number(value) and 0 < value < 1, "a number above 0, below 1"),
            "n_components": SectionKey(32, _make_minimum_check(1), "a whole number of at least 1"),
            "pca_mat_path": SectionKey(None, _is_path, "a path or None"),
            "weight_load_dir": SectionKey(None, _is_path, "a path or None"),
            "timeout": SectionKey(1800, lambda value: _is_number(value) and value > 0, "a number of seconds above 0"),
        },
    }
)


@dataclasses.dataclass(frozen=True)
class BoostConfig:
    """A configuration of features for faster training.

    Attributes:
      values: read-only mappings from section to key to value, with all of `SECTIONS`.
      given: the keys that were in the dictionary, as "section.key".
    """

    values: Mapping[str, Mapping[str, Any]]
    given: frozenset[str] = frozenset()

    @classmethod
    def from_dict(cls, config: Mapping[str, Any] | None = None) -> BoostConfig:
        """Makes a configuration from a mapping of sections to mappings of keys; missing keys get their defaults.

        Raises:
          TypeError: the configuration or a section is not a mapping, or a value is not a list where a list is needed.
          ValueError: a section or a key is unknown, or a value is not allowed; the message names a similar key.
        """
        config = {} if config is None else config
        _check_mapping(config, "the configuration", "{'boost': {...}, ...}")
        for section, content in config.items():
            _check_known_name(section, SECTIONS, "section", section)
            _check_mapping(content, f"the section {section}", f"{{'{section}': {{...}}}}")
            for key, value in content.items():
                _check_known_name(key, SECTIONS[section], f"key of {section}", f"{section}.{key}")
                known = SECTIONS[section][key]
                if not known.is_allowed(value):
                    is_list = key == "gradient_split_groups" and not isinstance(value, (list, tuple))
                    problem, fix = f"{section}.{key} is wrong", f"Leave it out for {known.default!r}."
                    kind = TypeError if is_list else ValueError
                    raise option_error(kind, "BoostConfig", key, problem, known.expected, shown(value), fix)
        values = {
            section: MappingProxyType(
                {key: _list_to_tuple(config.get(section, {}).get(key, known.default)) for key, known in keys.items()}
            )
            for section, keys in SECTIONS.items()
        }
        given = frozenset(f"{section}.{key}" for section, content in config.items() for key in content)
        return cls(MappingProxyType(values), given)

    @classmethod
    def from_json(cls, source: str | os.PathLike) -> BoostConfig:
        """Makes a configuration from a JSON file, or from JSON text that begins with a brace.

        Raises:
          TypeError, ValueError: as for `from_dict`; also if the text is not JSON.
          OSError: the file cannot be read.
        """
        is_text = isinstance(source, str) and source.lstrip().startswith("{")
        text = str(source) if is_text else _read_file(source, "a JSON file")
        return cls._parse_config_text(json.loads, text, "JSON", "the text" if is_text else os.fspath(source))

    @classmethod
    def from_toml(cls, path: str | os.PathLike) -> BoostConfig:
        """Makes a configuration from a TOML file with a table for each section.

        Raises:
          TypeError, ValueError: as for `from_dict`; also if the text is not TOML.
          OSError: the file cannot be read.
        """
        if sys.version_info >= (3, 11):
            import tomllib
        else:
            import tomli as tomllib
        return cls._parse_config_text(tomllib.loads, _read_file(path, "a TOML file"), "TOML", os.fspath(path))

    @classmethod
    def _parse_config_text(cls, parse, text, form, where):
        try:
            config = parse(text)
        except ValueError as error:
            raise wrong_format_error(form, error, "BoostConfig", where, text) from None
        try:
            return cls.from_dict(config)
        except (TypeError, ValueError) as error:
            raise (TypeError if isinstance(error, TypeError) else ValueError)(f"{where}: {error}") from error

    def __getitem__(self, section: str) -> Mapping[str, Any]:
        """Returns the values of a section."""
        return self.values[section]

    def chosen_features(self, level: str = "O1") -> tuple[str, ...]:
        """Returns the features that are on, in the order of `FEATURES`.

        Args:
          level: "O0" turns all features off in every mode; "O1" and "O2" choose features in the mode "auto".
        Raises:
          ValueError: the level is unknown.
        """
        if level not in LEVELS:
            expected, fix = f"one of {', '.join(LEVELS)}", did_you_mean(level, LEVELS, "Take O1.")
            raise ValueError(message("boost", "unknown level", expected, shown(level), fix))
        mode = self["boost"]["mode"]
        if level == "O0" or mode == "disable_all":
            return ()
        if mode == "enable_all":
            return FEATURES
        return LEVELS[level] if mode == "auto" else tuple(name for name in FEATURES if self["boost"][name])


def _read_file(path, expected_content):
    try:
        return read_text(path)
    except OSError as error:
        raise unreadable_file_error(error, "BoostConfig", path, expected_content) from None


def _check_mapping(value, what, expected):
    check_instance("BoostConfig", what, value, Mapping, "a mapping", "Write keys and values.", expected)


def _check_known_name(name, known_names, kind, place):
    if name not in known_names:
        elsewhere = [f"{section}.{name}" for section, keys in SECTIONS.items() if name in keys]
        fix = f"Did you mean {elsewhere[0]!r}?" if elsewhere else did_you_mean(name, known_names, "Remove it.")
        problem = f"unknown {kind}, {place!r}"
        raise option_error(
            ValueError, "BoostConfig", name, problem, f"one of {', '.join(known_names)}", shown(name), fix
        )


def _list_to_tuple(value):
    return tuple(value) if isinstance(value, list) else value
