"""Defines typed hyperparameters: `tf.contrib.training.HParams`."""

from __future__ import annotations

import json
import numbers
import re

_ASSIGNMENT = re.compile(
    r"\s*(?P<name>[a-zA-Z][\w.]*)(?:\[\s*(?P<index>\d+)\s*\])?\s*=\s*(?:\[(?P<list>[^\]]*)\]|(?P<value>[^,\[]*))\s*(?:,|$)"
)


def _parse(text: str, kind: type, name: str):
    """Parses a text as a value of a type; raises ValueError if that fails."""
    text = text.strip()
    try:
        if kind is bool:
            words = {"true": True, "false": False}
            return words[text.lower()] if text.lower() in words else bool(int(text))
        return kind(text)
    except (KeyError, ValueError):
        raise ValueError(f"HParams: Could not parse {name}={text!r} as {kind.__name__}.") from None


def _convert(value, kind: type, name: str):
    """Converts a value to a hyperparameter's type; raises ValueError if the conversion loses information."""
    if value is None or kind is type(None) or isinstance(value, kind) and kind not in (int, float, bool, str, bytes):
        return value
    wrong = ValueError(f"HParams: {name} has type {kind.__name__}; got {value!r} of type {type(value).__name__}.")
    if issubclass(kind, (str, bytes)):
        if not isinstance(value, (str, bytes)):
            raise wrong
        return value if isinstance(value, kind) else (value.decode() if issubclass(kind, str) else value.encode())
    if issubclass(kind, bool) != isinstance(value, bool):
        raise wrong
    if issubclass(kind, numbers.Integral) and not isinstance(value, numbers.Integral):
        raise wrong
    if issubclass(kind, numbers.Number) and not isinstance(value, numbers.Number):
        raise wrong
    return kind(value)


def _duplicate_error(name: str) -> ValueError:
    return ValueError(f"HParams: Multiple assignments to variable '{name}' in one text.")


def parse_values(values: str, type_map: dict, ignore_unknown: bool = False) -> dict:
    """Parses a text such as `"name=value,list=[1,2],list[1]=3"`.

    Args:
      values: the text.
      type_map: name -> type of the value, or type of the elements of a list.
      ignore_unknown: whether to ignore names that `type_map` lacks.

    Returns:
      name -> value, list, or {index: value}.

    Raises:
      ValueError: the text is malformed, a name is unknown or occurs twice, or a value has the wrong type.
    """
    found: dict = {}
    position = 0
    while position < len(values):
        match = _ASSIGNMENT.match(values, position)
        if match is None:
            raise ValueError(f"HParams: cannot read {values[position:]!r}. Expected name=value or name=[value,...].")
        position = match.end()
        name, index = match["name"], match["index"]
        if name not in type_map:
            if ignore_unknown:
                continue
            raise ValueError(f"HParams: Unknown hyperparameter type for {name}. Expected one of {sorted(type_map)}.")
        kind = type_map[name]
        if index is not None:
            if match["list"] is not None:
                raise ValueError(f"HParams: Assignment of a list to a list index. {name}[{index}] takes one value.")
            places = found.setdefault(name, {})
            if not isinstance(places, dict) or int(index) in places:
                raise _duplicate_error(f"{name}[{index}]" if isinstance(places, dict) else name)
            places[int(index)] = _parse(match["value"], kind, name)
            continue
        if name in found:
            raise _duplicate_error(name)
        if match["list"] is not None:
            words = [word for word in match["list"].split(",") if word.strip()]
            found[name] = [_parse(word, kind, name) for word in words]
        else:
            found[name] = _parse(match["value"], kind, name)
    return found


class HParams:
    """A set of hyperparameters as attributes, each with the type of its initial value.

    Args:
      hparam_def: not supported (a protocol buffer of 1.15); pass the values by name.
      model_structure: any object; `get_model_structure` returns it unchanged.
      **kwargs: names and values; all elements of a list must have one type.
    """

    _HAS_DYNAMIC_ATTRIBUTES = True

    def __init__(self, hparam_def=None, model_structure=None, **kwargs):
        if hparam_def is not None:
            raise ValueError("HParams: hparam_def is not available here; pass names and values as arguments.")
        self._hparam_types = {}
        self._model_structure = model_structure
        for name, value in kwargs.items():
            self.add_hparam(name, value)

    def add_hparam(self, name, value):
        """Adds a hyperparameter; raises ValueError if the name is in use or the value is an empty list."""
        if getattr(self, name, None) is not None:
            raise ValueError(f"HParams: the name {name!r} is taken.")
        if isinstance(value, (list, tuple)):
            if not value:
                raise ValueError(f"HParams: {name} is an empty list; its elements' type is not known.")
            self._hparam_types[name] = (type(value[0]), True)
        else:
            self._hparam_types[name] = (type(value), False)
        setattr(self, name, value)

    def set_hparam(self, name, value):
        """Sets a hyperparameter; raises ValueError for a value of another type."""
        kind, is_list = self._hparam_types[name]
        if isinstance(value, list) != is_list and not (is_list and isinstance(value, tuple)):
            raise ValueError(f"HParams: Must {'' if is_list else 'not '}pass a list for {name}; got {value!r}.")
        setattr(self, name, [_convert(each, kind, name) for each in value] if is_list else _convert(value, kind, name))

    def del_hparam(self, name):
        """Removes a hyperparameter."""
        if hasattr(self, name):
            delattr(self, name)
            del self._hparam_types[name]

    def parse(self, values):
        """Overrides values from a text such as `"rate=0.1,layers=[3,4]"`; returns self."""
        for name, value in parse_values(values, {name: kind for name, (kind, _) in self._hparam_types.items()}).items():
            if isinstance(value, dict):
                changed = list(getattr(self, name))
                for index, each in value.items():
                    changed[index] = each
                value = changed
            elif self._hparam_types[name][1] and not isinstance(value, list):
                raise ValueError(f"HParams: {name} takes a list; got {value!r}. Write {name}=[{value}].")
            self.set_hparam(name, value)
        return self

    def override_from_dict(self, values_dict):
        """Overrides values from a dictionary; returns self."""
        for name, value in values_dict.items():
            self.set_hparam(name, value)
        return self

    set_from_map = override_from_dict

    def parse_json(self, values_json):
        """Overrides values from JSON; returns self."""
        return self.override_from_dict(json.loads(values_json))

    def to_json(self, indent=None, separators=None, sort_keys=False):
        """Returns all values as JSON, without functions."""
        values = {name: value for name, value in self.values().items() if not callable(value)}
        return json.dumps(values, indent=indent, separators=separators, sort_keys=sort_keys)

    def values(self):
        """Returns all values by name."""
        return {name: getattr(self, name) for name in self._hparam_types}

    def get(self, key, default=None):
        """Returns a value, or `default` for an unknown name; raises ValueError for a default of another type."""
        if key not in self._hparam_types:
            return default
        kind, is_list = self._hparam_types[key]
        if default is not None:
            if is_list != isinstance(default, list):
                kind_of_value = "a list" if is_list else "a single value"
                raise ValueError(f"HParams: {key} is {kind_of_value}, but the default is {default!r}.")
            for each in default if is_list else [default]:
                _convert(each, kind, key)
        return getattr(self, key)

    def set_model_structure(self, model_structure):
        """Stores an object for `get_model_structure`."""
        self._model_structure = model_structure

    def get_model_structure(self):
        """Returns the object given to the constructor or to `set_model_structure`."""
        return self._model_structure

    def __contains__(self, key):
        return key in self._hparam_types

    def __str__(self):
        return ",".join(f"{name}={value}" for name, value in self.values().items())

    def __repr__(self):
        return f"HParams({sorted(self.values().items())})"
