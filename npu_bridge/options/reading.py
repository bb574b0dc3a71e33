"""Turns an NPURunConfig or a session's ConfigProto into `TrainingOptions`, and options back into a ConfigProto.

Objects of the caller are never changed: a ConfigProto is copied before an entry is added.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Mapping
from typing import Any

from npu_bridge.base import environment
from npu_bridge.base.errors import message, option_error, say_on_terminal, say_once, shortened, shown
from npu_bridge.base.terminal import escape_in_line
from npu_bridge.base.tf_internals.training import session_config
from npu_bridge.options.catalogue import OPTIONS
from npu_bridge.options.kinds import HelperObject, Integer, RawBytes
from npu_bridge.options.rules import HELPER_RULES, RULES, Settings
from npu_bridge.options.table import (
    DYNAMIC_INPUT,
    IN_OBJECT,
    IN_SESSION,
    RUN_CONFIG,
    Option,
    OptionSource,
    UnknownKeyError,
)
from npu_bridge.options.training_options import TrainingOptions

DEFAULT_CHECKPOINT_STEPS = 100  # for an NPURunConfig without steps and seconds
ENTRY_NAME = "NpuOptimizer"
_MOST_NAMES = 3  # number of names in a line about several options
_SLOT_TYPES = {"s": "string", "i": "integer", "b": "boolean"}


def read_run_config(config: Any) -> TrainingOptions:
    """Returns the options of an NPURunConfig.

    First reads the `NpuOptimizer` entries in its `session_config`; then the NPURunConfig's own values override them.

    Args:
      config: an NPURunConfig.
    Raises:
      TypeError, ValueError: an option, or a combination of options, is illegal.
    """
    given = optimizer_entry_values(session_config(config))
    own = _values_of_config(config)
    sent = _values_sent_to_session(own)
    for name in given.keys() & sent.keys():
        _warn_of_overridden_entry(OPTIONS[name], given[name], sent[name])
    given.update(sent)
    given.update({name: value for name, value in own.items() if OPTIONS[name].key is None})
    return _apply_rules(collect_settings(given, IN_OBJECT))


def _warn_of_overridden_entry(option, value, own):
    if option.kind.normalise(value) != option.kind.normalise(own):
        problem = f"the NPURunConfig's own {option.name} overrides the {ENTRY_NAME} entry of session_config"
        expected, got = "one value", f"{shown(own)}, and {shown(value)} in the entry"
        fix = f"Write NPURunConfig({option.name}=...)."
        say_once(logging.WARNING, message("NPURunConfig", problem, expected, got, fix))


def read_session_config(session_config: Any) -> TrainingOptions:
    """Returns the options of a session.

    Reads all entries named `NpuOptimizer` in order; for each key, the last value counts.

    Args:
      session_config: a ConfigProto, with or without such entries, or None.
    Raises:
      ValueError: a value, or a combination of options, is illegal. Unknown keys only cause a warning.
    """
    return _apply_rules(collect_settings(optimizer_entry_values(session_config), IN_SESSION))


def read_option_keywords(function: str, values: Mapping[str, Any]) -> TrainingOptions:
    """Returns the options that a function takes as keywords.

    Args:
      function: name of the function, for messages.
      values: by option name; None for unset options.
    Raises:
      TypeError, ValueError: an option, or a combination of options, is illegal.
    """
    return _apply_rules(collect_settings(dict(values), OptionSource(is_session=False, function=function)))


def parameter_values(config: Any) -> dict[str, Any]:
    """Returns an NPURunConfig's values for the parameter_map, by session key: `str`, `int` or `bool`."""
    sent = _values_sent_to_session(_values_of_config(config))
    return {OPTIONS[name].key: OPTIONS[name].kind.normalise(value) for name, value in sent.items()}


def with_optimizer_entry(session_config: Any, values: Mapping[str, Any]) -> Any:
    """Returns a copy of a ConfigProto with one more `NpuOptimizer` entry.

    Args:
      session_config: a ConfigProto, left unchanged; None for an empty one.
      values: by session key, as from `parameter_values`.
    Returns:
      A new ConfigProto.
    Raises:
      ValueError: a key is unknown.
    """
    if session_config is None:
        from tensorflow.compat.v1 import ConfigProto

        changed = ConfigProto()
    else:
        changed = copy.deepcopy(session_config)
    entry = changed.graph_options.rewrite_options.custom_optimizers.add()
    entry.name = ENTRY_NAME
    for key, value in values.items():
        slot = OPTIONS.option_by_key(key).kind.session_field
        setattr(entry.parameter_map[key], slot, value.encode("utf-8") if isinstance(value, str) else value)
    return changed


def make_session_config(config: Any) -> Any:
    """Copies an NPURunConfig's ConfigProto, and adds an `NpuOptimizer` entry with all options of the NPURunConfig."""
    return with_optimizer_entry(session_config(config), parameter_values(config))


def check_helper_object(owner: str, values: Mapping[str, Any]) -> None:
    """Checks the values of one helper object: first each value, then combinations within the object.

    Raises:
      TypeError, ValueError: a value, or a combination, is illegal.
    """
    options = OPTIONS.options_of(owner)
    for option in options:
        option.check(values[option.name], IN_OBJECT)
    plain = {o.name: o.normalise(values[o.name]) for o in options if o.has_plain_value}
    given = frozenset(name for name, value in values.items() if value is not None)
    for rule in HELPER_RULES.get(owner, ()):
        rule(Settings(plain, given, IN_OBJECT))


def _apply_rules(settings: Settings) -> TrainingOptions:
    """Applies the rules; returns the options, overridden by the options that the launcher sets."""
    for rule in RULES:
        rule(settings)
    values, imposed = settings.values, environment.options_set_by_launcher()
    imposed = {name: value for name, value in imposed.items() if name in values}
    return TrainingOptions({**values, **imposed}, _log_unusual_options(settings))


def collect_settings(given_values: dict[str, Any], source: OptionSource) -> Settings:
    """Returns the input of the rules: the given values, each checked, and the defaults of all other options.

    Raises:
      TypeError, ValueError: a value is illegal.
    """
    plain_options = [option for option in OPTIONS if option.has_plain_value]
    for option in plain_options:
        if option.name in given_values:
            option.check(given_values[option.name], source)
    values = {option.name: _normalise_value(option, given_values) for option in plain_options}
    for option in plain_options:
        if option.variable and option.name not in given_values:
            _read_environment_value(option, values, source)
    return Settings(values, frozenset(n for n, v in given_values.items() if v is not None), source)


def _normalise_value(option: Option, values: Mapping[str, Any]) -> Any:
    # An option without a session key has no value for an absent key: a given None means None.
    if option.key is None and option.name in values and values[option.name] is None:
        return None
    return option.normalise(values.get(option.name))


def _read_environment_value(option: Option, values: dict[str, Any], source: OptionSource) -> None:
    """Gives an unset option the value of its environment variable."""
    text = environment.read_variable(option.variable)
    if text is None:
        return
    value: Any = text
    if option.kind.session_field == "b":
        value = environment.is_flag_on(option.variable)
    elif isinstance(option.kind, Integer):
        value = environment.parse_whole_number(text)
        if value is None:
            problem, fix = f"{option.variable} is not a whole number", "Correct or unset it."
            raise option_error(ValueError, "environment", option.name, problem, option.kind.expected, repr(text), fix)
    option.check(value, source)
    values[option.name] = option.normalise(value)


def _log_unusual_options(settings: Settings) -> list[str]:
    """Returns the names of options that differ from their default; rank 0 logs deprecated and ineffective ones."""
    # Only an NPURunConfig writes this key, and it has already given these warnings about its own options.
    is_sent = settings.place.is_session and "min_group_size" in settings.given
    names = []
    for option in OPTIONS:
        value = settings.values.get(option.name)
        usual = [option.absent if settings.place.is_session else option.default]
        usual += [option.default] if is_sent else []
        usual += [DEFAULT_CHECKPOINT_STEPS] if option.name == "save_checkpoints_steps" else []
        is_own = option.name in settings.given and value not in usual
        if not is_own or (is_sent and option.name in _option_values_of_task()):
            continue
        names.append(option.name)
        if is_sent or environment.probable_rank() != 0:
            continue
        place, name = settings.place.holder_of(option), settings.place.spelling(option)
        if option.effect.level == "recorded":
            kept = f"{place}: {name}={shortened(repr(value), 240)} is kept but has no effect here."
            say_once(logging.INFO, f"{kept} {option.effect.note}".rstrip())
        if option.status == "deprecated":
            fix = f" Use {option.replaced_by}." if option.replaced_by else ""
            say_once(logging.WARNING, f"{place}: {name} is deprecated.{fix}")
    return names


def announce_ineffective_options(options: TrainingOptions) -> None:
    """Prints in one line, when a training begins, how many of the set options have no effect here.

    Only rank 0 prints, on standard error. Each line is printed once in a process.
    """
    given = options._set_names
    idle = [name for name in given if name in OPTIONS and OPTIONS[name].effect.level == "recorded"]
    if not idle or environment.probable_rank() != 0:
        return
    names = ", ".join(idle[:_MOST_NAMES]) + (", ..." if len(idle) > _MOST_NAMES else "")
    script = escape_in_line(sys.argv[0]) if sys.argv[0].endswith(".py") else "SCRIPT"
    of_all = f"{len(idle)} of the {len(given)} options you set" if len(given) > 1 else "the option you set"
    some = f"{of_all} {'has' if len(idle) == 1 else 'have'} no effect here"
    say_on_terminal(f"npu_bridge: {some} ({names}): npu-run effects {script} lists them")


def _values_of_config(config: Any) -> dict[str, Any]:
    """Returns the plain values of an NPURunConfig and of its helper objects, by option name."""
    owners = _find_config_objects(config)
    values: dict[str, Any] = {}
    for option in OPTIONS:
        owner = owners.get(option.owner)
        if option.has_plain_value and owner is not None:
            values[option.name] = getattr(owner, option.attribute)
        elif option.sent_without_helper:
            values[option.name] = option.default
    return values


def _values_sent_to_session(config_values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of an NPURunConfig that are sent to a session."""
    dynamic = [config_values.get(option.name) for option in OPTIONS.options_of(DYNAMIC_INPUT)]
    sent = {}
    for name, value in config_values.items():
        option = OPTIONS[name]
        is_incomplete = option.owner == DYNAMIC_INPUT and None in dynamic
        if not option.key or is_incomplete or (option.needs and not config_values.get(option.needs)):
            continue
        if option.needs and value is None:
            value = option.absent
        if value is not None or not option.accepts_none:
            sent[option.name] = value
    sent.update(_option_values_of_task())
    return sent


def _find_config_objects(config: Any, owner: str = RUN_CONFIG) -> dict[str, Any]:
    """Returns a config object and its helper objects by owner name; None for an unset helper."""
    found = {owner: config}
    for option in OPTIONS.options_of(owner):
        if isinstance(option.kind, HelperObject):
            helper = None if config is None else getattr(config, option.attribute)
            found.update(_find_config_objects(helper, option.kind.owner))
    return found


def _option_values_of_task() -> dict[str, Any]:
    task = environment.read_tf_config().get("task") or {}
    own = {"job": task.get("type", "localhost"), "task_index": int(task.get("index", 0))}
    return {**own, "use_off_line": True, "min_group_size": True}


def optimizer_entry_values(session_config: Any) -> dict[str, Any]:
    """Returns the values in all `NpuOptimizer` entries of a ConfigProto, by option name."""
    given: dict[str, Any] = {}
    if session_config is None:
        return given
    for entry in session_config.graph_options.rewrite_options.custom_optimizers:
        if entry.name != ENTRY_NAME:
            continue
        for key in sorted(entry.parameter_map):
            try:
                option = OPTIONS.option_by_key(key)
            except UnknownKeyError as error:  # scripts can have keys of newer NPU stacks
                say_once(logging.WARNING, str(error))
                continue
            value = _read_map_value(option, entry.parameter_map[key])
            if value is not None:
                given[option.name] = value
    return given


def _read_map_value(option: Option, attribute: Any) -> Any:
    """Returns the value of a key in the parameter_map; None if the key must be skipped.

    In some scripts, the value of a key is in the wrong slot of the AttrValue. Such a value is converted if
    possible, otherwise skipped, and a warning is logged. For some options the NPU stack itself is strict: then a wrong
    slot raises an error, or the key is always skipped.
    """
    slot = option.kind.session_field
    used = attribute.WhichOneof("value")
    if used == slot:
        return _decode_text(option, getattr(attribute, slot))
    value = (
        _convert_to_field_type(getattr(attribute, used), slot)
        if used
        else _decode_text(option, getattr(attribute, slot))
    )
    if option.strict_slot == "skip" or value is None or option.kind.find_problem(value) is not None:
        value = None
    problem = f"{option.key} is in slot .{used} of its AttrValue" if used else f"{option.key} has an empty AttrValue"
    expected = f"slot .{slot} ({_SLOT_TYPES[slot]})"
    got = f"slot .{used}" if used else "nothing"
    fix = f"Write parameter_map[{option.key!r}].{slot} = ..."
    where = IN_SESSION.holder_of(option)
    if option.strict_slot == "error":
        raise option_error(ValueError, where, option.name, problem, expected, got, fix)
    what = "The key is left out" if value is None else f"It is read as {shown(value)}"
    say_once(logging.WARNING, message(where, problem, expected, got, f"{what}; w{fix[1:]}"))
    return value


def _convert_to_field_type(value: Any, field: str) -> Any:
    """Converts the value of one slot to another slot's type; returns None if the value has no meaning there."""
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if not isinstance(value, (bool, int, float, str)):
        return None
    if field == "s":
        return str(value).lower() if isinstance(value, bool) else str(value)
    if isinstance(value, str):
        value = {"true": True, "false": False}.get(value.strip().lower(), value)
    try:
        number = int(value)
    except (ValueError, OverflowError):
        return None
    if not isinstance(value, str) and number != value:
        return None
    return number if field == "i" else {0: False, 1: True}.get(number)


def _decode_text(option: Option, value: Any) -> Any:
    if isinstance(value, bytes) and not isinstance(option.kind, RawBytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError as error:
            words = (f"{option.key} is not text", "UTF-8", repr(value), "Encode the text as UTF-8.")
            raise option_error(ValueError, IN_SESSION.holder_of(option), option.name, *words) from error
    return value
