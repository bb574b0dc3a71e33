"""Reads and writes optimizer variables in `.keras` and `.weights.h5` files, for trainings with other stages.

Keras numbers the variables of an optimizer, and loads all of them or none. Ours come after those of the inner
optimizer, and their names are noted next to the numbers, so that each is loaded where it fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from npu_bridge.gradients import kept_state

_NAMES = "npu_bridge_names"
_WHICH = "the loaded file"


def note_names(store: Any, inner_count: int, state: Sequence) -> None:
    """Notes the names of the stages' variables, if the file format has room for them."""
    attributes = getattr(store, "attrs", None)
    if attributes is not None and state:
        attributes[_NAMES] = names_by_number(inner_count, state)


def names_by_number(inner_count: int, state: Sequence) -> list[str]:
    """Returns `number=name` for each variable of the stages."""
    return [f"{inner_count + number}={name}" for number, name in enumerate(_names(state))]


def load_by_name(store: Any, inner: Sequence, state: Sequence, noted: Sequence[str] | None = None) -> bool:
    """Loads values that fit and logs the others; returns False if Keras can load all, or the inner optimizer differs.

    Args:
      store: arrays by number.
      inner: the variables of the inner optimizer; the file must have them with their shapes.
      state: the variables of the stages.
      noted: the result of `names_by_number` when the file was written; None for the names that `note_names` stored.
    """
    saved = [np.asarray(store[str(number)]) for number in range(len(store.keys())) if str(number) in store]
    if noted is None:
        noted = getattr(store, "attrs", {}).get(_NAMES, ())
    by_name = {name: int(number) for number, _, name in (str(each).partition("=") for each in noted)}
    is_alike = len(saved) == len(inner) + len(state) and (not by_name or list(by_name) == _names(state))
    if is_alike or not fits_all(inner, saved) or len(inner) not in (len(saved), min(by_name.values(), default=-1)):
        return False
    for variable, value in zip(inner, saved):
        variable.assign(value)
    found = {name: saved[number] for name, number in by_name.items()}
    begun = []
    for name, variable in zip(_names(state), state):
        if name in found and variable.shape.is_compatible_with(found[name].shape):
            variable.assign(found.pop(name))
        else:
            begun.append(name)
    kept_state.say_begun(_WHICH, _told(begun), ())
    kept_state.say_dropped(_WHICH, _told(found))
    return True


def fits_all(variables: Sequence, values: Sequence[np.ndarray]) -> bool:
    """Returns True when each variable has a value of its shape."""
    pairs = list(zip(variables, values))
    return len(pairs) == len(variables) and all(one.shape.is_compatible_with(value.shape) for one, value in pairs)


def _names(variables):
    """Returns the names used in files: kind and number, as the names of layers change from model to model."""
    counts: dict[str, int] = {}
    names = []
    for variable in variables:
        parts = variable.name.partition(":")[0].split("/")
        kind = "/".join(parts[: 1 + (f"{parts[0]}/" == kept_state.OF_RANKS)])
        kind += "_rows" * (len(parts) > 1 and parts[-1].endswith("_rows"))
        counts[kind] = counts.get(kind, 0) + 1
        names.append(f"{kind}#{counts[kind]}")
    return names


def _told(names):
    return [name.partition("#")[0] for name in names if kept_state.OF_RANKS not in name]
