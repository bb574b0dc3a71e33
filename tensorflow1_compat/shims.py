"""Functions of older numpy, Python and other packages that old scripts call, on what is installed."""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib
import inspect
import json
import os
import platform
import random
import re
from typing import Any

from npu_bridge.base.environment import write_variable
from tensorflow1_compat.journal import say_once

ArgSpec = collections.namedtuple("ArgSpec", "args varargs keywords defaults")


def getargspec(function: Any) -> ArgSpec:
    """Arguments, `*` name, `**` name and defaults of a function; keyword-only arguments raise ValueError."""
    full = inspect.getfullargspec(function)
    if full.kwonlyargs or full.annotations and full.kwonlydefaults:
        raise ValueError("Function has keyword-only parameters; use inspect.signature, which supports them.")
    return ArgSpec(full.args, full.varargs, full.varkw, full.defaults)


def to_numpy_matrix(graph: Any, *arguments: Any, **options: Any) -> Any:
    """A graph's adjacency as a `numpy.matrix`."""
    numpy, networkx = importlib.import_module("numpy"), importlib.import_module("networkx")
    return numpy.asmatrix(networkx.to_numpy_array(graph, *arguments, **options))


def asscalar(array: Any) -> Any:
    """The only element of an array."""
    return array.item()


def linux_distribution(*_: Any, **__: Any) -> tuple[str, str, str]:
    """Name, version and code name of the system, empty where it does not say."""
    facts: dict[str, str] = {}
    with contextlib.suppress(AttributeError, OSError):
        facts = platform.freedesktop_os_release()  # since Python 3.10
    return facts.get("NAME", ""), facts.get("VERSION_ID", ""), facts.get("VERSION_CODENAME", "")


def json_load(file: Any, **options: Any) -> Any:
    """`json.load`, with the argument `encoding` of its past."""
    _drop_encoding("json.load", options)
    return json.load(file, **options)


def json_loads(text: Any, **options: Any) -> Any:
    """`json.loads`, with the argument `encoding` of its past."""
    _drop_encoding("json.loads", options)
    return json.loads(text, **options)


def _drop_encoding(name: str, options: dict[str, Any]) -> None:
    if "encoding" in options:
        del options["encoding"]
        say_once(f"{name}(encoding=)", "gone since Python 3.9; it had no effect")


def sample(population: Any, k: int, **options: Any) -> list:
    """`random.sample`, also of a set."""
    if isinstance(population, (set, frozenset)):
        say_once("random.sample of a set", "refused since Python 3.11; a tuple of it is used")
        population = tuple(population)
    return random.sample(population, k, **options)


def matplotlib_use(backend: str, *_: Any, **options: Any) -> None:
    """`matplotlib.use`, with the argument `warn` of its past."""
    if "warn" in options:
        del options["warn"]
        say_once("matplotlib.use(warn=)", "gone since matplotlib 3.3; it is left out")
    importlib.import_module("matplotlib").use(backend, **options)


def _ragged(name: str) -> Any:
    numpy = importlib.import_module("numpy")
    real = getattr(numpy, name)

    @functools.wraps(real)
    def make(*arguments: Any, **options: Any) -> Any:
        try:
            return real(*arguments, **options)
        except ValueError as error:
            if "inhomogeneous" not in str(error) or len(arguments) > 1 or options.get("dtype") is not None:
                raise
            say_once(
                f"numpy.{name} of rows of different lengths",
                "refused since numpy 1.24; dtype=object is used, as it was",
            )
            return real(*arguments, **{**options, "dtype": object})

    return make


def _sparse_matrix(name: str, new_name: str | None = None) -> Any:
    """A function of networkx that returns a SciPy matrix, as before networkx 3; sums of an array have one axis less."""
    networkx = importlib.import_module("networkx")
    real = getattr(networkx, new_name or name)

    @functools.wraps(real)
    def make(*arguments: Any, **options: Any) -> Any:
        made = real(*arguments, **options)
        sparse = importlib.import_module("scipy.sparse")
        if isinstance(made, sparse.spmatrix):
            return made
        say_once(f"networkx.{name}", "returns a sparse array since networkx 3; it is made the matrix it was")
        return getattr(sparse, f"{made.format}_matrix")(made)

    return make


def _save() -> Any:
    numpy = importlib.import_module("numpy")

    @functools.wraps(numpy.save)
    def save(file: Any, arr: Any, *arguments: Any, **options: Any) -> None:
        if isinstance(arr, (list, tuple)):  # before the file is opened: one that cannot be written stays as it was
            arr = _ragged("asarray")(arr)
        numpy.save(file, arr, *arguments, **options)

    return save


def _load_text() -> Any:
    """`numpy.loadtxt`, also with a delimiter of several characters."""
    numpy = importlib.import_module("numpy")
    real = numpy.loadtxt
    one_character = "\x1f"  # which ASCII has for this, and texts do not

    @functools.wraps(real)
    def load(*arguments: Any, **options: Any) -> Any:
        given = inspect.signature(real).bind(*arguments, **options).arguments
        delimiter = _decoded(given.get("delimiter"))
        if not isinstance(delimiter, str) or len(delimiter) < 2:
            return real(*arguments, **options)
        say_once("numpy.loadtxt(delimiter=) of several characters", "refused since numpy 1.23; it splits as it did")
        with contextlib.ExitStack() as files:
            lines, encoding = given.pop("fname"), given.get("encoding", "bytes")
            if isinstance(lines, (str, os.PathLike)):
                encoding = "latin1" if encoding == "bytes" else encoding
                opened = numpy.lib.npyio.DataSource(None).open(os.fspath(lines), "rt", encoding=encoding)
                lines = files.enter_context(opened)
            changed = (_decoded(line).replace(delimiter, one_character) for line in lines)
            return real(changed, **{**given, "delimiter": one_character})

    return load


def _decoded(text: Any) -> Any:
    return text.decode("latin1") if isinstance(text, bytes) else text


def _deterministic() -> Any:
    """`patch` of the package tensorflow-determinism; its own bias_add, which is for GPUs, is left out."""

    def patch() -> None:
        say_once("tfdeterminism.patch", "refuses TensorFlow since 2.1; only TF_CUDNN_DETERMINISTIC=1 is set, as by it")
        write_variable("TF_CUDNN_DETERMINISTIC", "1")

    return patch


def _with_channels(module: str, name: str) -> Any:
    """A function of scikit-image that also takes `multichannel`, as before 0.21."""
    real = getattr(importlib.import_module(module), name)

    @functools.wraps(real)
    def make(*arguments: Any, **options: Any) -> Any:
        if "multichannel" in options and "channel_axis" in inspect.signature(real).parameters:
            say_once(f"{module}.{name}(multichannel=)", "gone since scikit-image 0.21; channel_axis is used")
            options["channel_axis"] = -1 if options.pop("multichannel") else None
        return real(*arguments, **options)

    return make


def _save_several(name: str) -> Any:
    real = getattr(importlib.import_module("numpy"), name)

    def whole(value: Any) -> Any:
        return _ragged("asarray")(value) if isinstance(value, (list, tuple)) else value

    @functools.wraps(real)
    def save(file: Any, *values: Any, **named: Any) -> None:
        real(file, *map(whole, values), **{key: whole(value) for key, value in named.items()})

    return save


def _define_enum() -> Any:
    from absl import flags

    @functools.wraps(flags.DEFINE_enum)
    def define(name: Any, default: Any, enum_values: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(enum_values, str):  # ("keras', 'graph"), with a quote too few
            say_once("flags.DEFINE_enum(enum_values=str)", "an error since absl 2.0; its words are the values")
            enum_values = re.findall(r"\w+", enum_values)
        return flags.DEFINE_enum(name, default, enum_values, *arguments, **options)

    return define


def _yaml(name: str) -> Any:
    yaml = importlib.import_module("yaml")
    real = getattr(yaml, name)

    @functools.wraps(real)
    def read(stream: Any, Loader: Any = None) -> Any:  # noqa: N803 - its name in PyYAML
        if Loader is None:
            say_once(f"yaml.{name} without Loader", "refused since PyYAML 6; yaml.FullLoader is used")
            Loader = yaml.FullLoader
        return real(stream, Loader)

    return read


_LATE = {
    "define_enum": _define_enum,
    "array": lambda: _ragged("array"),
    "asarray": lambda: _ragged("asarray"),
    "adjacency_matrix": lambda: _sparse_matrix("adjacency_matrix"),
    "laplacian_matrix": lambda: _sparse_matrix("laplacian_matrix"),
    "normalized_laplacian_matrix": lambda: _sparse_matrix("normalized_laplacian_matrix"),
    "to_scipy_sparse_matrix": lambda: _sparse_matrix("to_scipy_sparse_matrix", "to_scipy_sparse_array"),
    "gaussian": lambda: _with_channels("skimage.filters", "gaussian"),
    "rescale": lambda: _with_channels("skimage.transform", "rescale"),
    "structural_similarity": lambda: _with_channels("skimage.metrics", "structural_similarity"),
    "deterministic": _deterministic,
    "loadtxt": _load_text,
    "save": _save,
    "savez": lambda: _save_several("savez"),
    "savez_compressed": lambda: _save_several("savez_compressed"),
    "yaml_load": lambda: _yaml("load"),
    "yaml_load_all": lambda: _yaml("load_all"),
}


def __getattr__(name: str) -> Any:
    """Wrappers of packages that are imported only when a script has asked for them."""
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = _LATE[name]()
    return value
