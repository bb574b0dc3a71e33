"""Imports names of a package on first use."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Callable


def attributes(package: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a package.

    Args:
      package: the package.
      places: the place of each name: `module`, or `module:name` for something inside it.
    """

    def __getattr__(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return found_at(places[name])

    return __getattr__


def found_at(place: str) -> Any:
    """Returns a module by its name, or something in it by `module:name`."""
    module, _, inside = place.partition(":")
    found = importlib.import_module(module)
    return getattr(found, inside) if inside else found


def submodules(package: str, *names: str) -> dict[str, str]:
    """Returns the places of a package's own modules, for `attributes`."""
    return {name: f"{package}.{name}" for name in names}
