"""Imports names of a package on first use."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Mapping
from typing import Any, Callable


def lazy_getattr(package: str, places_by_name: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns a `__getattr__` for a package, which imports a name on first use.

    Args:
      package: the package's name.
      places_by_name: where each name is: `module` for a module, or `module:name` for an object in a module.
    """

    def __getattr__(name: str) -> Any:
        if name not in places_by_name:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return import_module_or_object(places_by_name[name])

    return __getattr__


def import_module_or_object(place: str) -> Any:
    """Imports and returns a module, given as `module`, or an object in it, given as `module:name` or `module:a.b`."""
    module, _, inside = place.partition(":")
    found = importlib.import_module(module)
    return operator.attrgetter(inside)(found) if inside else found


def places_of_submodules(package: str, *names: str) -> dict[str, str]:
    """Returns the argument `places` of `lazy_getattr` for modules of a package: the full name of each module."""
    return {name: f"{package}.{name}" for name in names}
