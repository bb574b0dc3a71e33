"""Restores the behaviour of numpy 1.16 in functions that now refuse some arguments or return other results."""

from __future__ import annotations

import builtins
import contextlib
import functools
import inspect
import operator
import os
import types
from collections.abc import Callable
from typing import Any

import numpy

from tensorflow1_compat.journal import say_once

_VERSION = numpy.lib.NumpyVersion(numpy.__version__)
_IS_2, _REFUSES_BYTES = _VERSION >= "2.0.0", _VERSION >= "2.3.0"


def _accepting_old_arguments(name: str) -> Any:
    """Makes a version of `array`, `asarray` or `asanyarray` that accepts arguments which newer versions refuse.

    These are rows of different lengths, numbers that overflow the dtype, and `copy=False` where a copy is needed.
    """
    real = getattr(numpy, name)

    @functools.wraps(real)
    def make(*arguments: Any, **options: Any) -> Any:
        try:
            return real(*arguments, **options)
        except ValueError as error:
            if _IS_2 and options.get("copy") is False and "avoid copy" in str(error):
                say_once(f"numpy.{name}(copy=False)", "refused since numpy 2 where a copy is needed; the copy is made")
                return make(*arguments, **{**options, "copy": None})
            if "inhomogeneous" not in str(error) or len(arguments) > 1 or options.get("dtype") is not None:
                raise
            say_once(
                f"numpy.{name} of rows of different lengths",
                "refused since numpy 1.24; dtype=object is used, as before",
            )
            return real(*arguments, **{**options, "dtype": object})
        except OverflowError as error:
            if "out of bounds" not in str(error):
                raise
            say_once(f"numpy.{name} of numbers beyond the type", "refused since numpy 2; they wrap around, as before")
            kind = arguments[1] if len(arguments) > 1 else options.pop("dtype")
            return real(arguments[0], None, *arguments[2:], **options).astype(kind)

    return make


array, asarray, asanyarray = map(_accepting_old_arguments, ("array", "asarray", "asanyarray"))


def _accepting_ragged_rows(real: Callable) -> Any:
    """Returns a numpy function that also accepts rows of different lengths, as an array of objects."""

    @functools.wraps(real)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return real(*arguments, **options)
        except ValueError as error:
            if "inhomogeneous" not in str(error):
                raise
        return real(*map(_as_objects, arguments), **{key: _as_objects(value) for key, value in options.items()})

    return call


def _as_objects(value: Any) -> Any:
    found = asarray(value) if isinstance(value, (list, tuple)) else value
    return found if isinstance(found, numpy.ndarray) and found.dtype.hasobject else value


append, array_split, delete = map(_accepting_ragged_rows, (numpy.append, numpy.array_split, numpy.delete))
repeat, shape, split, take = map(_accepting_ragged_rows, (numpy.repeat, numpy.shape, numpy.split, numpy.take))


@functools.cache
def draw_ragged_rows() -> None:
    """Makes `numpy.random.choice` and `permutation` accept rows of different lengths, for all code.

    A stand-in of `numpy.random` would not do: scikit-learn and others ask whether a generator is this module itself.
    """
    for name in ("choice", "permutation"):
        draw = _accepting_ragged_rows(getattr(numpy.random, name))
        draw.__module__, draw.__qualname__ = "numpy.random", name  # as pickle finds it
        setattr(numpy.random, name, draw)


@functools.wraps(numpy.full)
def full(shape: Any, fill_value: Any, dtype: Any = None, *arguments: Any, **options: Any) -> Any:
    """Calls `numpy.full`; a number that overflows the dtype wraps around."""
    if dtype is not None and isinstance(fill_value, int):
        fill_value = array(fill_value, dtype)[()]
    return numpy.full(shape, fill_value, dtype, *arguments, **options)


@functools.wraps(numpy.fromstring)
def fromstring(string: Any, dtype: Any = float, count: int = -1, sep: str = "", **options: Any) -> Any:
    """Calls `numpy.fromstring`; also accepts bytes."""
    if sep != "" or not _REFUSES_BYTES:
        return numpy.fromstring(string, dtype, count, sep=sep, **options)
    say_once("numpy.fromstring of bytes", "refused since numpy 2.3; a copy of numpy.frombuffer is used")
    return numpy.frombuffer(string.encode() if isinstance(string, str) else string, dtype, count, **options).copy()


def _wrap_to_accept_old_keyword(name: str, old: str, new: str) -> Any:
    """Returns a numpy function that also accepts the keyword `old` for its argument `new`."""
    real = getattr(numpy, name)

    @functools.wraps(real)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return real(*arguments, **options)
        except TypeError as error:
            if old not in options or "unexpected keyword" not in str(error):
                raise
        say_once(f"numpy.{name}({old}=)", f"gone; it is {new}= now")
        options[new] = options.pop(old)
        return real(*arguments, **options)

    return call


histogram = _wrap_to_accept_old_keyword("histogram", "normed", "density")
percentile, quantile = (
    _wrap_to_accept_old_keyword("percentile", "interpolation", "method"),
    _wrap_to_accept_old_keyword("quantile", "interpolation", "method"),
)
nanpercentile = _wrap_to_accept_old_keyword("nanpercentile", "interpolation", "method")
nanquantile = _wrap_to_accept_old_keyword("nanquantile", "interpolation", "method")
reshape = _wrap_to_accept_old_keyword("reshape", "newshape", "shape")


def _wrap_to_accept_generator(name: str) -> Any:
    """Returns a numpy function of several arrays that also accepts a generator or `map`."""
    real = getattr(numpy, name)

    @functools.wraps(real)
    def call(arrays: Any, *arguments: Any, **options: Any) -> Any:
        if not hasattr(arrays, "__getitem__") and hasattr(arrays, "__iter__"):
            say_once(f"numpy.{name} of a generator", "refused since numpy 1.24; the generator is made a list first")
            arrays = list(arrays)
        return real(arrays, *arguments, **options)

    return call


column_stack, dstack, hstack = (
    _wrap_to_accept_generator("column_stack"),
    _wrap_to_accept_generator("dstack"),
    _wrap_to_accept_generator("hstack"),
)
stack, vstack = _wrap_to_accept_generator("stack"), _wrap_to_accept_generator("vstack")


def _wrap_to_return_list(function_name: str) -> Any:
    """Returns a numpy function whose results are a list as in numpy 1, not a tuple."""
    real = getattr(numpy, function_name)

    @functools.wraps(real)
    def call(*arguments: Any, **options: Any) -> Any:
        found = real(*arguments, **options)
        return list(found) if isinstance(found, tuple) else found

    return call


atleast_1d, atleast_2d, atleast_3d = map(_wrap_to_return_list, ("atleast_1d", "atleast_2d", "atleast_3d"))
broadcast_arrays, meshgrid = _wrap_to_return_list("broadcast_arrays"), _wrap_to_return_list("meshgrid")


def _wrap_to_accept_scalar(function_name: str) -> Any:
    """Returns a version of `nonzero` or `where` that also accepts single numbers and booleans."""
    real = getattr(numpy, function_name)

    @functools.wraps(real)
    def call(a: Any, *arguments: Any) -> Any:
        if not arguments and numpy.ndim(a) == 0:
            say_once(
                f"numpy.{function_name} of a single value", "refused since numpy 2.1; the value is made an array first"
            )
            a = numpy.atleast_1d(a)
        return real(a, *arguments)

    return call


nonzero, where = _wrap_to_accept_scalar("nonzero"), _wrap_to_accept_scalar("where")


@functools.wraps(numpy.cross)
def cross(a: Any, b: Any, axisa: int = -1, axisb: int = -1, axisc: int = -1, axis: int | None = None) -> Any:
    """Calls `numpy.cross`; also accepts vectors with 2 components."""
    from_a, from_b = (axisa, axisb) if axis is None else (axis, axis)
    first, second = numpy.moveaxis(numpy.asarray(a), from_a, -1), numpy.moveaxis(numpy.asarray(b), from_b, -1)
    lengths = first.shape[-1], second.shape[-1]
    if 2 not in lengths or not {2, 3}.issuperset(lengths) or not _IS_2:
        return numpy.cross(a, b, axisa, axisb, axisc, axis)
    say_once("numpy.cross of vectors with 2 components", "deprecated since numpy 2; the result is unchanged")
    if lengths == (2, 2):
        return first[..., 0] * second[..., 1] - first[..., 1] * second[..., 0]
    first, second = (
        numpy.concatenate([one, numpy.zeros_like(one[..., :1])], -1) if one.shape[-1] == 2 else one
        for one in (first, second)
    )
    return numpy.cross(first, second, axisc=axisc if axis is None else axis)


@functools.wraps(numpy.sum)
def sum(a: Any, *arguments: Any, **options: Any) -> Any:
    """Calls `numpy.sum`; also accepts a generator, whose values Python's `sum` adds."""
    if isinstance(a, types.GeneratorType) and _IS_2:
        say_once("numpy.sum of a generator", "refused since numpy 2.4; Python's sum is used, as before")
        return builtins.sum(a)
    return numpy.sum(a, *arguments, **options)


@functools.wraps(numpy.unique)
def unique(ar: Any, return_index: bool = False, return_inverse: bool = False, *arguments: Any, **options: Any) -> Any:
    """Calls `numpy.unique`; returns the inverse as a flat array."""
    found = numpy.unique(ar, return_index, return_inverse, *arguments, **options)
    if not return_inverse:
        return found
    place = 1 + bool(return_index)
    return (*found[:place], found[place].reshape(-1), *found[place + 1 :])


@functools.wraps(numpy.linspace)
def linspace(start: Any, stop: Any, num: Any = 50, *arguments: Any, **options: Any) -> Any:
    """Calls `numpy.linspace`; also accepts a float as the number of points."""
    try:
        num = operator.index(num)
    except TypeError:
        say_once(
            "numpy.linspace with a float as number of points", "refused since numpy 1.18; the float is rounded down"
        )
        num = int(num)
    return numpy.linspace(start, stop, num, *arguments, **options)


@functools.wraps(numpy.save)
def save(file: Any, arr: Any, *arguments: Any, **options: Any) -> None:
    """Calls `numpy.save`; also accepts rows of different lengths."""
    if isinstance(arr, (list, tuple)):  # convert first: if this fails, the file stays unchanged
        arr = asarray(arr)
    numpy.save(file, arr, *arguments, **options)


def _wrap_to_accept_ragged_rows(real_function: Callable) -> Any:
    def whole(value: Any) -> Any:
        return asarray(value) if isinstance(value, (list, tuple)) else value

    @functools.wraps(real_function)
    def save(file: Any, *values: Any, **named: Any) -> None:
        real_function(file, *map(whole, values), **{key: whole(value) for key, value in named.items()})

    return save


savez, savez_compressed = _wrap_to_accept_ragged_rows(numpy.savez), _wrap_to_accept_ragged_rows(numpy.savez_compressed)


@functools.wraps(numpy.loadtxt)
def loadtxt(*arguments: Any, **options: Any) -> Any:
    """Calls `numpy.loadtxt`; also accepts a delimiter of several characters. Converters get bytes."""
    given = inspect.signature(numpy.loadtxt).bind(*arguments, **options).arguments
    given.setdefault("encoding", "bytes")  # None since numpy 2
    delimiter = _decode(given.get("delimiter"))
    if not isinstance(delimiter, str) or len(delimiter) < 2:
        return numpy.loadtxt(**given)
    say_once("numpy.loadtxt(delimiter=) of several characters", "refused since numpy 1.23; lines are split as before")
    one_character = "\x1f"  # ASCII's separator, which texts do not contain
    with contextlib.ExitStack() as files:
        lines, encoding = given.pop("fname"), given["encoding"]
        if isinstance(lines, (str, os.PathLike)):
            encoding = "latin1" if encoding == "bytes" else encoding
            opened = numpy.lib.npyio.DataSource(None).open(os.fspath(lines), "rt", encoding=encoding)
            lines = files.enter_context(opened)
        changed = (_decode(line).replace(delimiter, one_character) for line in lines)
        return numpy.loadtxt(changed, **{**given, "delimiter": one_character})


@functools.wraps(numpy.genfromtxt)
def genfromtxt(*arguments: Any, **options: Any) -> Any:
    """Calls `numpy.genfromtxt`; returns texts as bytes unless an encoding is given."""
    given = inspect.signature(numpy.genfromtxt).bind(*arguments, **options).arguments
    given.setdefault("encoding", "bytes")  # None since numpy 2
    return numpy.genfromtxt(**given)


def _decode(text: Any) -> Any:
    return text.decode("latin1") if isinstance(text, bytes) else text
