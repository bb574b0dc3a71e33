"""Restores functions of older versions of Python and other packages that old scripts call."""

from __future__ import annotations

import collections.abc
import contextlib
import functools
import importlib
import inspect
import json
import platform
import random
import re
from typing import Any

from npu_bridge.base.environment import write_variable
from tensorflow1_compat.journal import say_once

ArgSpec = collections.namedtuple("ArgSpec", "args varargs keywords defaults")


def getargspec(function: Any) -> ArgSpec:
    """Returns a function's arguments, `*` name, `**` name and defaults, as `inspect.getargspec` did.

    Raises:
      ValueError: the function has keyword-only arguments.
    """
    full = inspect.getfullargspec(function)
    if full.kwonlyargs or full.annotations and full.kwonlydefaults:
        raise ValueError("Function has keyword-only parameters; use inspect.signature, which supports them.")
    return ArgSpec(full.args, full.varargs, full.varkw, full.defaults)


def to_numpy_matrix(graph: Any, *arguments: Any, **options: Any) -> Any:
    """Returns a graph's adjacency matrix as a `numpy.matrix`."""
    numpy, networkx = importlib.import_module("numpy"), importlib.import_module("networkx")
    return numpy.asmatrix(networkx.to_numpy_array(graph, *arguments, **options))


def linux_distribution(*_: Any, **__: Any) -> tuple[str, str, str]:
    """Returns (name, version, code name) of the Linux distribution; "" if unknown."""
    facts: dict[str, str] = {}
    with contextlib.suppress(AttributeError, OSError):
        facts = platform.freedesktop_os_release()  # since Python 3.10
    return facts.get("NAME", ""), facts.get("VERSION_ID", ""), facts.get("VERSION_CODENAME", "")


def json_load(file: Any, **options: Any) -> Any:
    """Calls `json.load`; accepts and ignores the removed argument `encoding`."""
    _drop_encoding("json.load", options)
    return json.load(file, **options)


def json_loads(text: Any, **options: Any) -> Any:
    """Calls `json.loads`; accepts and ignores the removed argument `encoding`."""
    _drop_encoding("json.loads", options)
    return json.loads(text, **options)


def _drop_encoding(name: str, options: dict[str, Any]) -> None:
    if "encoding" in options:
        del options["encoding"]
        say_once(f"{name}(encoding=)", "gone since Python 3.9; the argument had no effect")


def sample(population: Any, k: int, **options: Any) -> list:
    """Calls `random.sample`; also accepts a set, the keys of a dictionary, and nodes of a networkx graph."""
    if isinstance(population, collections.abc.Set):
        say_once("random.sample of a set", "refused since Python 3.11; a tuple of the set is used")
        population = tuple(population)
    return random.sample(population, k, **options)


def matplotlib_use(backend: str, *_: Any, **options: Any) -> None:
    """Calls `matplotlib.use`; accepts and ignores the removed argument `warn`."""
    if "warn" in options:
        del options["warn"]
        say_once("matplotlib.use(warn=)", "gone since matplotlib 3.3; it is left out")
    importlib.import_module("matplotlib").use(backend, **options)


def _wrap_to_return_matrix(name: str, new_name: str | None = None) -> Any:
    """Returns a networkx function that returns a SciPy matrix as before networkx 3, not a sparse array.

    Code can depend on the difference: a sum over an axis keeps the axis in a matrix, but not in an array.
    """
    networkx = importlib.import_module("networkx")
    real = getattr(networkx, new_name or name)

    @functools.wraps(real)
    def make(*arguments: Any, **options: Any) -> Any:
        made = real(*arguments, **options)
        sparse = importlib.import_module("scipy.sparse")
        if isinstance(made, sparse.spmatrix):
            return made
        say_once(f"networkx.{name}", "returns a sparse array since networkx 3; it is converted to a sparse matrix")
        return getattr(sparse, f"{made.format}_matrix")(made)

    return make


def deterministic() -> None:
    """Replaces `tfdeterminism.patch`, but does not replace `bias_add` on GPUs."""
    say_once("tfdeterminism.patch", "refuses TensorFlow since 2.1; only TF_CUDNN_DETERMINISTIC=1 is set, as by it")
    write_variable("TF_CUDNN_DETERMINISTIC", "1")


def _wrap_to_accept_multichannel(module: str, function_name: str) -> Any:
    """Returns a scikit-image function that also accepts `multichannel`, as before version 0.21."""
    real = getattr(importlib.import_module(module), function_name)

    @functools.wraps(real)
    def make(*arguments: Any, **options: Any) -> Any:
        if "multichannel" in options and "channel_axis" in inspect.signature(real).parameters:
            say_once(f"{module}.{function_name}(multichannel=)", "gone since scikit-image 0.21; channel_axis is used")
            options["channel_axis"] = -1 if options.pop("multichannel") else None
        return real(*arguments, **options)

    return make


def _make_define_enum() -> Any:
    from absl import flags

    @functools.wraps(flags.DEFINE_enum)
    def define(name: Any, default: Any, enum_values: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(enum_values, str):  # ("keras', 'graph"), with a quote too few
            say_once("flags.DEFINE_enum(enum_values=str)", "an error since absl 2.0; its words are the values")
            enum_values = re.findall(r"\w+", enum_values)
        return flags.DEFINE_enum(name, default, enum_values, *arguments, **options)

    return define


def _wrap_to_accept_no_loader(function_name: str) -> Any:
    yaml = importlib.import_module("yaml")
    real = getattr(yaml, function_name)

    @functools.wraps(real)
    def read(stream: Any, Loader: Any = None) -> Any:  # noqa: N803 - its name in PyYAML
        if Loader is None:
            say_once(f"yaml.{function_name} without Loader", "refused since PyYAML 6; yaml.FullLoader is used")
            Loader = yaml.FullLoader
        return real(stream, Loader)

    return read


_LATE = {
    "define_enum": _make_define_enum,
    "adjacency_matrix": lambda: _wrap_to_return_matrix("adjacency_matrix"),
    "laplacian_matrix": lambda: _wrap_to_return_matrix("laplacian_matrix"),
    "normalized_laplacian_matrix": lambda: _wrap_to_return_matrix("normalized_laplacian_matrix"),
    "to_scipy_sparse_matrix": lambda: _wrap_to_return_matrix("to_scipy_sparse_matrix", "to_scipy_sparse_array"),
    "gaussian": lambda: _wrap_to_accept_multichannel("skimage.filters", "gaussian"),
    "rescale": lambda: _wrap_to_accept_multichannel("skimage.transform", "rescale"),
    "structural_similarity": lambda: _wrap_to_accept_multichannel("skimage.metrics", "structural_similarity"),
    "yaml_load": lambda: _wrap_to_accept_no_loader("load"),
    "yaml_load_all": lambda: _wrap_to_accept_no_loader("load_all"),
}


def __getattr__(name: str) -> Any:
    """Makes a wrapper at its first use, so that the wrapped package is only imported if a script needs it."""
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = _LATE[name]()
    return value
