"""Finds modules by the documented paths that scripts and saved models use; the modules themselves are in `estimator/`.

For example, `npu_bridge.tbe.npu_vector_ops` is a second name of the module `npu_bridge.estimator.npu_vector_ops`.
Packages such as `npu_bridge.tbe` have no folder; they are made here.
"""

from __future__ import annotations

import types

from npu_bridge.base.lazy import lazy_getattr
from npu_bridge.base.same_modules import make_importable

_KEPT = "npu_bridge.estimator"

# For each package its docstring, and the place of each of its names, as `module` or `module:name` below `estimator`.
_PACKAGES = {
    "_api": ("A second way to `npu_bridge.experimental`.", {"experimental": "experimental"}),
    "helper": (
        "`helper.get_gen_ops()`, under both names that scripts import it by.",
        {"get_gen_ops": "helper:get_gen_ops", "helper": "helper"},
    ),
    "image": ("Operators on images.", {"image_ops": "image_ops"}),
    "npu_cpu": (
        "Operators that the NPU stack runs on the device's processor, computed by TensorFlow.",
        {"lru_cache": "lru_cache", "npu_cpu_ops": "npu_cpu_ops"},
    ),
    "profiler": ("Traces of part of a script.", {"profiler": "profiler"}),
    "scoped_graph_manager": (
        "The scope around the initialisation of variables.",
        {"scoped_graph_manager": "scoped_graph_manager"},
    ),
    "tbe": (
        "Operators that the NPU stack compiles on demand, computed by TensorFlow.",
        {"npu_cube_ops": "npu_cube_ops", "npu_vector_ops": "npu_vector_ops"},
    ),
}
# Documented both directly below `npu_bridge` and in `estimator/`.
NAMES = ("experimental", *_PACKAGES)


def enable_documented_paths() -> None:
    """Makes the documented paths importable; calling it again has no effect."""
    make_importable("npu_bridge", _find_module)


def _find_module(name: str) -> str | types.ModuleType | None:
    """Returns the module for a name below `npu_bridge`: its real path, or a new package. Other names give None."""
    package, _, inside = name.partition(".")
    if name == "experimental":
        return f"{_KEPT}.{name}"
    if package not in _PACKAGES:
        return None
    description, places = _PACKAGES[package]
    if inside:
        return f"{_KEPT}.{places[inside]}" if inside in places and ":" not in places[inside] else None
    made = types.ModuleType(f"npu_bridge.{package}", description)
    made.__all__ = sorted(places)
    made.__getattr__ = lazy_getattr(made.__name__, {name: f"{_KEPT}.{place}" for name, place in places.items()})
    return made
