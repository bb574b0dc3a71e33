"""Makes the error message for a name that does not exist in this package or the installed TensorFlow."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from tensorflow1_compat import journal
from tensorflow1_compat.insides import find_replacement_of_inner_module
from tensorflow1_compat.tables import GONE, OF_1, NameTables

__all__ = ["advise_replacement", "describe_missing_name", "import_error", "shorten_name"]


def describe_missing_name(name: str, neighbours: Iterable[str] = (), tables: NameTables = OF_1) -> str:
    """Records a missing name; returns a message: where the name is used, its replacement, and where to report it.

    Args:
      name: the old name with its module, such as `tensorflow.contrib.layers.foo`.
      neighbours: other names of the same module.
      tables: further names that could replace `name`.
    """
    advice = advise_replacement(name, neighbours, tables)
    journal.record_use("missing", name, advice)
    return (
        f"{journal.place_of_caller()}: {shorten_name(name)} is not available under npu-run. {advice} If the script "
        f"needs it, please open an issue of the npu_bridge project."
    )


def import_error(
    name: str, neighbours: Iterable[str], tables: NameTables, kind: type[ImportError] = ImportError
) -> ImportError:
    """Returns the error for an import of a missing name; `is_described` marks the error as explained in full."""
    error = kind(describe_missing_name(name, neighbours, tables), name=name)
    error.is_described = True
    return error


def shorten_name(name: str) -> str:
    """Returns a full name as scripts write it, such as `tf.nn.relu`."""
    for long in ("npu_bridge.npu_init.tf.", "tensorflow."):
        if name.startswith(long):
            return f"tf.{name[len(long) :]}"
    return name


def advise_replacement(name: str, neighbours: Iterable[str] = (), tables: NameTables = OF_1) -> str:
    """Returns a sentence with the nearest replacement of a missing name. If none exists, the sentence says so."""
    parts = name.split(".")
    if find_replacement_of_inner_module(".".join(parts[:4])):  # inner modules of contrib are known by their short names
        parts[3:-1] = []
    for length in range(len(parts), 0, -1):
        known = GONE.get(".".join(parts[:length]))
        if known:
            return f"Use {known}."
    leaf = parts[-1]
    elsewhere = [key for key in (*tables.names, *tables.modules) if key.rpartition(".")[2] == leaf and key != name]
    if elsewhere:
        return f"The nearest is {shorten_name(elsewhere[0])}."
    alike = difflib.get_close_matches(leaf, list(neighbours), n=1, cutoff=0.6)
    if alike:
        return f"The nearest is {shorten_name('.'.join([*parts[:-1], alike[0]]))}."
    return "No similar name exists here."
