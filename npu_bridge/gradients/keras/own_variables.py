"""Reads and writes optimizer variables in `.keras` and `.weights.h5` files, even if the stages have changed since.

Keras numbers the variables of an optimizer, and loads either all of them or none. The variables of stages come after
the variables of the inner optimizer. Files also store the names of the stages' variables, so that a value is
loaded if a variable has the same name and shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from npu_bridge.gradients.checkpoints import kept_state

NAMES_KEY = "npu_bridge_names"  # under which a file holds the names of the stages' variables
CHECKPOINT_LABEL = "the loaded file"
_REPLICAS = (f"{kept_state.OF_RANKS}weights_", f"{kept_state.OF_RANKS}slots_")


def save_variable_names(store: Any, inner_count: int, state: Sequence) -> None:
    """Stores the names of the stages' variables in a file, if the file format has attributes."""
    attributes = getattr(store, "attrs", None)
    if attributes is not None and state:
        attributes[NAMES_KEY] = numbered_names(inner_count, state)


def numbered_names(inner_count: int, state: Sequence) -> list[str]:
    """Returns a string `number=name` for each variable of the stages."""
    return [f"{inner_count + number}={name}" for number, name in enumerate(_names_in_files(state))]


def load_matching_values(
    store: Any, inner: Sequence, state: Sequence, recorded_names: Sequence[str] | None = None
) -> bool:
    """Loads the values that fit, and logs the others.

    Args:
      store: mapping from numbers to the arrays of a file.
      inner: the variables of the inner optimizer; the file must contain them all, with their shapes.
      state: the variables of the stages.
      recorded_names: the result of `numbered_names` when the file was saved; None takes the names written by
        `save_variable_names`.
    Returns:
      True if values were loaded; False if Keras can load all values, or the file has another inner optimizer.
    """
    saved = [np.asarray(store[str(number)]) for number in range(len(store.keys())) if str(number) in store]
    if recorded_names is None:
        recorded_names = getattr(store, "attrs", {}).get(NAMES_KEY, ())
    by_name = {name: int(number) for number, _, name in (str(each).partition("=") for each in recorded_names)}
    is_alike = len(saved) == len(inner) + len(state) and (not by_name or list(by_name) == _names_in_files(state))
    if (
        is_alike
        or not all_shapes_fit(inner, saved)
        or len(inner) not in (len(saved), min(by_name.values(), default=-1))
    ):
        return False
    for variable, value in zip(inner, saved):
        variable.assign(value)
    found = {name: saved[number] for name, number in by_name.items()}
    begun = []
    for name, variable in zip(_names_in_files(state), state):
        if name in found and variable.shape.is_compatible_with(found[name].shape):
            variable.assign(found.pop(name))
        else:
            begun.append(name)
    kept_state.warn_about_missing_state(CHECKPOINT_LABEL, _names_without_numbers(begun), ())
    rows = [name.partition("#")[0] for name, value in found.items() if name.startswith(_REPLICAS) and value.size]
    kept_state.warn_about_dropped_state(CHECKPOINT_LABEL, [*_names_without_numbers(found), *rows])
    return True


def all_shapes_fit(variables: Sequence, values: Sequence[np.ndarray]) -> bool:
    """Returns whether each variable has a value of the same shape."""
    pairs = list(zip(variables, values))
    return len(pairs) == len(variables) and all(one.shape.is_compatible_with(np.shape(value)) for one, value in pairs)


def _names_in_files(variables):
    """Returns names for files: kind and number, because the variables' own names differ between models."""
    counts: dict[str, int] = {}
    names = []
    for variable in variables:
        parts = variable.name.partition(":")[0].split("/")
        kind = "/".join(parts[: 1 + (f"{parts[0]}/" == kept_state.OF_RANKS)])
        kind += "_rows" * (len(parts) > 1 and parts[-1].endswith("_rows"))
        counts[kind] = counts.get(kind, 0) + 1
        names.append(f"{kind}#{counts[kind]}")
    return names


def _names_without_numbers(names):
    return [name.partition("#")[0] for name in names if kept_state.OF_RANKS not in name]
