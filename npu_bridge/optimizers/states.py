"""Reads and sets the state of an optimizer, as arrays by variable name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from npu_bridge.base.arguments import check_instance, is_integer
from npu_bridge.base.errors import did_you_mean, message, shown
from npu_bridge.base.own_tensorflow import tf

_COUNT = "step_counter"
_KINDS = ("bool", "int", "float", "complex")  # each kind, except the first, can be converted to the next
_FIX = "Pass what get_states returned."


def get_states(count: Any, slots: dict, session: tf.compat.v1.Session | None = None) -> dict:
    """Returns the states in the form that `set_states` takes.

    Args:
      count: the variable that counts updates.
      slots: slot variables by variable name and slot name.
      session: a session of the TF 1 graph; by default the default session.
    Returns:
      A dictionary with "step_counter", an int, and for each slot name a dictionary of arrays by variable name. Further
      variables of a name are numbered: `v`, `v:1`. Slots that another rank keeps are left out.
    """
    variables: dict[Any, Any] = {_COUNT: count}
    for name, own in slots.items():
        variables.update(
            {(slot, name): variable for slot, variable in own.items() if variable.shape.is_fully_defined()}
        )
    if tf.executing_eagerly():
        values = {key: variable.numpy() for key, variable in variables.items()}
    else:
        values = _session_or_default(session).run(variables)
    states: dict[str, Any] = {_COUNT: int(values.pop(_COUNT))}
    for (slot, name), value in values.items():
        states.setdefault(slot, {})[name] = value
    return states


def set_states(owner: str, states: dict, count: Any, slots: dict, session: tf.compat.v1.Session | None = None) -> None:
    """Assigns the result of `get_states`. Variables that `states` does not name stay unchanged.

    After an error, all variables are unchanged.

    Raises:
      TypeError: a value is not the expected dictionary, or has numbers of a kind that its variable cannot hold.
      ValueError: there is no such slot or variable, a shape differs, or the count is out of range.
    """
    _check_states_form(owner, states, count)
    known = {(slot, name): variable for name, own in slots.items() for slot, variable in own.items()}
    chosen = []
    for slot, by_name in states.items():
        if slot == _COUNT:
            chosen.append((count, np.asarray(by_name)))
            continue
        for name, value in by_name.items():
            if (slot, name) not in known:
                got = f"{slot} of {name}"
                fix = did_you_mean(got, [f"{slot} of {name}" for slot, name in known], "Remove it.")
                raise ValueError(message(owner, "unknown state", "a slot of a variable", got, fix))
            variable, value = known[slot, name], _to_array(owner, f"{slot} of {name}", value, known[slot, name])
            if not variable.shape.is_compatible_with(value.shape):
                shapes = str(variable.shape), str(value.shape)
                raise ValueError(
                    message(
                        owner,
                        f"{slot} of {name} has another shape than its variable",
                        *shapes,
                        "Give an array of the variable's shape.",
                    )
                )
            chosen.append((variable, value))
    if tf.executing_eagerly():
        for variable, value in chosen:
            variable.assign(tf.cast(value, variable.dtype))
        return
    # Fed into the initialisers, so that nothing is added to a graph, which may be finalized.
    fed = {variable.initializer.inputs[1]: value for variable, value in chosen}
    _session_or_default(session).run([variable.initializer for variable, _ in chosen], fed)


def _check_states_form(owner, states, count):
    """Checks that `states` is a dictionary of dictionaries and, optionally, a count."""
    if not isinstance(states, Mapping):
        raise TypeError(
            message(owner, "the states are not a dictionary", "a dictionary by slot name", shown(states), _FIX)
        )
    for slot, by_name in states.items():
        if slot != _COUNT:
            expected = "a dictionary of arrays by variable"
            check_instance(owner, slot, by_name, Mapping, "a dictionary", _FIX, expected)
    if _COUNT not in states:
        return
    value = states[_COUNT]
    expected = f"a whole number from 0 to {count.dtype.base_dtype.max}"
    is_scalar = hasattr(value, "dtype") and np.asarray(value).dtype.kind in "iu" and not np.shape(value)
    if not is_integer(value) and not is_scalar:
        raise TypeError(message(owner, f"{_COUNT} is not a number of updates", expected, shown(value), _FIX))
    if not 0 <= int(value) <= count.dtype.base_dtype.max:
        raise ValueError(message(owner, f"{_COUNT} is out of range", expected, shown(value), _FIX))


def _to_array(owner, value_name, value, variable):
    """Converts a value to an array that a variable can hold; rejects strings, or fractions for integer variables."""
    try:
        array = np.asarray(value)
        given = _KINDS.index(_number_kind(tf.as_dtype(array.dtype)))
    except (TypeError, ValueError):  # no numbers, or lists of different lengths
        given = len(_KINDS)
    kind = _number_kind(variable.dtype)
    if given > _KINDS.index(kind) or (kind == "bool") != (given == 0):
        raise TypeError(
            message(owner, f"{value_name} has numbers of another kind", f"an array of {kind}", shown(value), _FIX)
        )
    return array


def _number_kind(dtype):
    if dtype.is_bool or dtype.is_complex:
        return "bool" if dtype.is_bool else "complex"
    return "int" if dtype.is_integer else "float" if dtype.is_floating else "no numbers"


class DeferredStates:
    """States that a Keras optimizer was given before it had slots."""

    def __init__(self):
        self._kept: dict[str, Any] = {}

    def defer_states(self, owner: str, values: dict, count: Any) -> None:
        """Keeps the states of slots until the slots are created; sets the number of updates immediately."""
        _check_states_form(owner, values, count)
        set_states(owner, {key: value for key, value in values.items() if key == _COUNT}, count, {})
        for slot, by_name in values.items():
            if slot != _COUNT:
                self._kept.setdefault(slot, {}).update(by_name)

    def add_kept_values(self, states: dict) -> dict:
        """Returns `states`, in the form of `get_states`, with the kept values added."""
        return {**states, **{slot: {**states.get(slot, {}), **own} for slot, own in self._kept.items()}}

    def assign(self, owner: str, count: Any, slots: dict) -> None:
        """Assigns the kept values to newly made slots and forgets them; raises the errors of `set_states`."""
        waiting, self._kept = self._kept, {}
        if waiting:
            set_states(owner, waiting, count, slots)


def _session_or_default(session):
    session = session or tf.compat.v1.get_default_session()
    if session is None:
        problem, fix = "there is no session", "Give a session, or call inside `with session:`."
        raise ValueError(message("get_states and set_states", problem, "a session", "none", fix))
    return session
