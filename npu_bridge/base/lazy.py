"""Imports names of a package on first use."""

from __future__ import annotations

import importlib
import operator
import sys
from collections.abc import Mapping
from typing import Any, Callable

from npu_bridge.base.after_import import importing_module_name
from npu_bridge.base.tensorflow_start import is_project_module


def lazy_getattr(package: str, places_by_name: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns a `__getattr__` for a package, which imports a name on first use.

    Args:
      package: the package's name.
      places_by_name: where each name is: `module` for a module, or `module:name` for an object in a module.
    """

    def __getattr__(name: str) -> Any:
        if name not in places_by_name:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = import_module_or_object(places_by_name[name])
        # A script that uses TensorFlow through this package gets its sessions and locks, whatever it imports first.
        if "tensorflow" in sys.modules and not is_project_module(importing_module_name()):
            importlib.import_module("npu_bridge.estimator")
        return found

    return __getattr__


def import_module_or_object(place: str) -> Any:
    """Imports and returns a module, given as `module`, or an object in it, given as `module:name` or `module:a.b`."""
    module, _, inside = place.partition(":")
    found = importlib.import_module(module)
    return operator.attrgetter(inside)(found) if inside else found


def places_of_submodules(package: str, *names: str) -> dict[str, str]:
    """Returns the argument `places` of `lazy_getattr` for modules of a package: the full name of each module."""
    return {name: f"{package}.{name}" for name in names}
