"""What an optimizer remembers, as arrays by the names of variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from npu_bridge.base.errors import did_you_mean, message, shown

_COUNT = "step_counter"


def get_states(count: Any, slots: dict, session: tf.compat.v1.Session | None = None) -> dict:
    """What `set_states` takes.

    Args:
      count: the variable that counts updates.
      slots: variable name to slot name to slot variable.
      session: of a TF 1 graph; the default one by default.
    Returns:
      "step_counter", an int, and for each slot name a dictionary of arrays by variable name. Slots that another rank
      keeps are left out.
    """
    variables: dict[Any, Any] = {_COUNT: count}
    for name, own in slots.items():
        variables.update(
            {(slot, name): variable for slot, variable in own.items() if variable.shape.is_fully_defined()}
        )
    if tf.executing_eagerly():
        values = {key: variable.numpy() for key, variable in variables.items()}
    else:
        values = _session(session).run(variables)
    states: dict[str, Any] = {_COUNT: int(values.pop(_COUNT))}
    for (slot, name), value in values.items():
        states.setdefault(slot, {})[name] = value
    return states


def set_states(owner: str, states: dict, count: Any, slots: dict, session: tf.compat.v1.Session | None = None) -> None:
    """Assigns what `get_states` gave; what it does not name stays as it is.

    Raises:
      ValueError: there is no such slot or variable, or a shape differs. Then nothing is assigned.
    """
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
            variable, value = known[slot, name], np.asarray(value)
            if not variable.shape.is_compatible_with(value.shape):
                shapes = str(variable.shape), str(value.shape)
                raise ValueError(message(owner, f"{slot} of {name} does not fit", *shapes, "Give its own."))
            chosen.append((variable, value))
    if tf.executing_eagerly():
        for variable, value in chosen:
            variable.assign(tf.cast(value, variable.dtype))
        return
    # Fed into the initialisers, so that nothing is added to a graph that may be finalized.
    fed = {variable.initializer.inputs[1]: value for variable, value in chosen}
    _session(session).run([variable.initializer for variable, _ in chosen], fed)


class StatesToCome:
    """States that were given to a Keras optimizer before it has made its slots, until it makes them."""

    def __init__(self):
        self._waiting: dict[str, Any] = {}

    def keep(self, owner: str, values: dict, count: Any) -> None:
        """Keeps what there are no slots for yet; the number of updates is set now."""
        for slot, by_name in values.items():
            if slot != _COUNT and not isinstance(by_name, Mapping):
                expected, fix = "a dictionary of arrays by variable", "Pass what get_states returned."
                raise TypeError(message(owner, f"{slot} is not a dictionary", expected, shown(by_name), fix))
        set_states(owner, {key: value for key, value in values.items() if key == _COUNT}, count, {})
        for slot, by_name in values.items():
            if slot != _COUNT:
                self._waiting.setdefault(slot, {}).update(by_name)

    def added_to(self, states: dict) -> dict:
        """What `get_states` gives, with what is kept here."""
        return {**states, **{slot: {**states.get(slot, {}), **own} for slot, own in self._waiting.items()}}

    def assign(self, owner: str, count: Any, slots: dict) -> None:
        """Gives slots that were just made what was kept for them; errors as of `set_states`."""
        waiting, self._waiting = self._waiting, {}
        if waiting:
            set_states(owner, waiting, count, slots)


def _session(session):
    session = session or tf.compat.v1.get_default_session()
    if session is None:
        problem, fix = "there is no session", "Give one, or use `with`."
        raise ValueError(message("get_states and set_states", problem, "a session=", "none", fix))
    return session
