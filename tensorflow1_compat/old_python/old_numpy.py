"""Replaces functions, tables and constants that numpy 1.16 to 1.26 had and numpy 2 lacks."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

# Numbers of the C interface, as in numpy 1.26.
ALLOW_THREADS, BUFSIZE, MAXDIMS = 1, 8192, 32
CLIP, WRAP, RAISE = 0, 1, 2
ERR_IGNORE, ERR_WARN, ERR_RAISE, ERR_CALL, ERR_PRINT, ERR_LOG, ERR_DEFAULT = 0, 1, 2, 3, 4, 5, 521
FLOATING_POINT_SUPPORT = 1
FPE_DIVIDEBYZERO, FPE_OVERFLOW, FPE_UNDERFLOW, FPE_INVALID = 1, 2, 4, 8
MAY_SHARE_BOUNDS, MAY_SHARE_EXACT = 0, -1
SHIFT_DIVIDEBYZERO, SHIFT_OVERFLOW, SHIFT_UNDERFLOW, SHIFT_INVALID = 0, 3, 6, 9
UFUNC_BUFSIZE_DEFAULT, UFUNC_PYVALS_NAME = 8192, "UFUNC_PYVALS"
tracemalloc_domain = 389047
NINF, NZERO, PZERO = -np.inf, -0.0, 0.0
numarray = oldnumeric = "removed"

_ERRORS = {"divide": SHIFT_DIVIDEBYZERO, "over": SHIFT_OVERFLOW, "under": SHIFT_UNDERFLOW, "invalid": SHIFT_INVALID}
_REACTIONS = ("ignore", "warn", "raise", "call", "print", "log")
# Types in the order in which a common type is searched.
_WIDENING, _KINDS = "?bBhHiIlLqQefdgFDGO", "buifcSUVOMm"

sctypes: dict[str, list[type]] = {
    "int": [np.int8, np.int16, np.int32, np.int64],
    "uint": [np.uint8, np.uint16, np.uint32, np.uint64],
    "float": [np.float16, np.float32, np.float64, np.longdouble],
    "complex": [np.complex64, np.complex128, np.clongdouble],
    "others": [bool, object, bytes, str, np.void],
}


def alen(a: Any) -> int:
    """Returns the length of the first axis; 1 for a number."""
    return len(np.atleast_1d(a))


def asscalar(a: Any) -> Any:
    """Returns the only element of an array as a Python number."""
    return a.item()


def asfarray(a: Any, dtype: Any = np.float64) -> np.ndarray:
    """Returns an array of floats: of `dtype` if `dtype` is a float type, else of float64."""
    return np.asarray(a, dtype if np.issubdtype(dtype, np.inexact) else np.float64)


def in1d(ar1: Any, ar2: Any, assume_unique: bool = False, invert: bool = False, **options: Any) -> np.ndarray:
    """Returns whether `ar2` contains each element of the flattened `ar1`."""
    return np.isin(np.asarray(ar1).ravel(), ar2, assume_unique=assume_unique, invert=invert, **options)


def msort(a: Any) -> np.ndarray:
    """Returns a copy sorted along the first axis."""
    return np.sort(a, axis=0)


def fastCopyAndTranspose(a: Any) -> np.ndarray:  # noqa: N802 - its name in numpy
    """Returns a transposed copy."""
    return np.array(np.transpose(a), order="C")


def disp(mesg: Any, device: Any = None, linefeed: bool = True) -> None:
    """Writes a text to a file; by default to standard output."""
    device = device or sys.stdout
    device.write(f"{mesg}\n" if linefeed else f"{mesg}")
    device.flush()


def source(object: Any, output: Any = None) -> None:
    """Prints the source of a function, class or module."""
    output = output or sys.stdout
    try:
        output.write(f"In file: {inspect.getsourcefile(object)}\n\n{inspect.getsource(object)}\n")
    except (OSError, TypeError):
        output.write("Not available for this object.\n")


def who(vardict: dict[str, Any] | None = None) -> None:
    """Prints names, shapes, bytes and types of arrays in a dictionary, by default the caller's global variables."""
    arrays = {
        name: value
        for name, value in (sys._getframe(1).f_globals if vardict is None else vardict).items()
        if isinstance(value, np.ndarray)
    }
    rows = [(name, " x ".join(map(str, a.shape)), str(a.nbytes), a.dtype.name) for name, a in arrays.items()]
    for row in [("Name", "Shape", "Bytes", "Type"), *rows] if rows else []:
        sys.stdout.write("{:16} {:16} {:16} {}\n".format(*row))
    total = sum({id(a): a.nbytes for a in arrays.values()}.values())
    sys.stdout.write(f"\nUpper bound on total bytes  =       {total}\n")


def kernel_version_of(release: str) -> tuple[int, int]:
    """Returns the first two numbers of a Linux release such as "5.15.0-91"."""
    first, second = (release.split(".") + ["0"])[:2]
    return int(first), int("".join(filter(str.isdigit, second)) or 0)


def recfromtxt(fname: Any, **options: Any) -> Any:
    """Calls `genfromtxt` with automatic types; returns a record array."""
    return np.genfromtxt(fname, **{"dtype": None, **options}).view(_choose_record_type(options))


def recfromcsv(fname: Any, **options: Any) -> Any:
    """Calls `genfromtxt` for a CSV file with a header line; returns a record array with lower-case names."""
    given = {"case_sensitive": "lower", "names": True, "delimiter": ",", "dtype": None, **options}
    return np.genfromtxt(fname, **given).view(_choose_record_type(options))


def _choose_record_type(options: dict[str, Any]) -> type:
    if not options.get("usemask"):
        return np.recarray
    from numpy.ma.mrecords import MaskedRecords

    return MaskedRecords


def mafromtxt(fname: Any, **options: Any) -> Any:
    """Calls `genfromtxt` with `usemask=True`; returns a masked array."""
    return np.genfromtxt(fname, **{**options, "usemask": True})


def ndfromtxt(fname: Any, **options: Any) -> Any:
    """Calls `genfromtxt` with `usemask=False`."""
    return np.genfromtxt(fname, **{**options, "usemask": False})


def obj2sctype(rep: Any, default: Any = None) -> Any:
    """Returns the scalar type of an array, a dtype, or a value that a dtype can be made of; else `default`."""
    if isinstance(rep, type) and issubclass(rep, np.generic):
        return rep
    if isinstance(rep, np.ndarray):
        return rep.dtype.type
    try:
        return np.dtype(rep).type
    except Exception:
        return default


def issctype(rep: Any) -> bool:
    """Returns whether an object is a dtype or a scalar type other than `object_`."""
    return isinstance(rep, (type, np.dtype)) and obj2sctype(rep) not in (None, np.object_)


def issubclass_(arg1: Any, arg2: Any) -> bool:
    """Calls `issubclass`, but returns False for objects that are not classes."""
    try:
        return issubclass(arg1, arg2)
    except TypeError:
        return False


def issubsctype(arg1: Any, arg2: Any) -> bool:
    """Returns whether the scalar type of `arg1` is a subtype of the scalar type of `arg2`."""
    return issubclass(obj2sctype(arg1), obj2sctype(arg2))


def sctype2char(sctype: Any) -> str:
    """Returns the character code of a scalar type.

    Raises:
      ValueError: `sctype` is not a scalar type.
      KeyError: `sctype` is an abstract type.
    """
    found = obj2sctype(sctype)
    if found is None:
        raise ValueError("unrecognized type")
    if found not in {np.dtype(letter).type for letter in np.typecodes["All"]}:
        raise KeyError(found)
    return np.dtype(found).char


def maximum_sctype(t: Any) -> Any:
    """Returns the widest type of the same kind for an integer, float or complex type; any other type unchanged."""
    found = obj2sctype(t)
    if found is None:
        return t
    kind = {"i": "int", "u": "uint", "f": "float", "c": "complex"}.get(np.dtype(found).kind)
    return sctypes[kind][-1] if kind else found


def find_common_type(array_types: Iterable[Any], scalar_types: Iterable[Any]) -> Any:
    """Returns a type that can hold all `array_types` and all `scalar_types` of a higher kind; None if none can."""
    of_arrays = _smallest_common_type([*map(np.dtype, array_types)])
    of_scalars = _smallest_common_type([*map(np.dtype, scalar_types)])
    if of_arrays is None or of_scalars is None:
        return of_scalars if of_arrays is None else of_arrays
    if _KINDS.find(of_scalars.kind) <= _KINDS.find(of_arrays.kind):
        return of_arrays
    if of_scalars > of_arrays:
        return of_scalars
    start = _WIDENING.find(of_scalars.char)
    return None if start < 0 else _smallest_common_type([of_scalars, of_arrays], start)


def _smallest_common_type(types: list[np.dtype], start: int = 0) -> Any:
    if len(types) < 2:
        return types[0] if types else None
    wider = map(np.dtype, _WIDENING[start:])
    return next((one for one in wider if all(one >= each for each in types)), None)


class _TableByScalarType(dict):
    """A dictionary by scalar type; look-ups accept anything that names a type: "f", float, np.float32."""

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(obj2sctype(key))


_CONCRETE = [np.dtype(letter).type for letter in "?bhilqBHILQefdgFDGSUVOMm"]
cast = _TableByScalarType({kind: lambda values, kind=kind: np.asarray(values).astype(kind) for kind in _CONCRETE})
nbytes = _TableByScalarType({kind: np.dtype(kind).itemsize for kind in _CONCRETE})


def get_array_wrap(*arguments: Any) -> Any:
    """Returns the `__array_wrap__` of the argument with the highest priority; None if no argument has one."""
    having = [value for value in arguments if hasattr(value, "__array_wrap__")]
    return max(having, key=lambda v: getattr(v, "__array_priority__", 0)).__array_wrap__ if having else None


def geterrobj() -> list[Any]:
    """Returns [buffer size, reactions to errors as a bit mask, error function]."""
    mask = sum(_REACTIONS.index(reaction) << _ERRORS[error] for error, reaction in np.geterr().items())
    return [np.getbufsize(), mask, np.geterrcall()]


def seterrobj(errobj: list[Any]) -> None:
    """Sets the values that `geterrobj` returns."""
    size, mask, function = errobj
    np.setbufsize(size)
    np.seterr(**{error: _REACTIONS[mask >> shift & 7] for error, shift in _ERRORS.items()})
    np.seterrcall(function)


def deprecate(*arguments: Any, **options: Any) -> Any:
    """Returns a function that warns at each call; without a function, returns a decorator for this.

    Args:
      arguments: optionally the function, followed by `old_name`, `new_name` and `message`.
      options: `old_name`, `new_name` and `message` by name.
    """
    if arguments:
        return _warn_at_calls(*arguments, **options)
    return lambda function: _warn_at_calls(function, **options)


def deprecate_with_doc(msg: str) -> Callable:
    """Returns a decorator that makes functions warn at each call."""
    return lambda function: _warn_at_calls(function, message=msg)


def _warn_at_calls(function: Any, old_name: Any = None, new_name: Any = None, message: Any = None) -> Any:
    old = old_name or function.__name__
    text = f"`{old}` is deprecated!" if new_name is None else f"`{old}` is deprecated, use `{new_name}` instead!"
    text += f"\n{message}" if message is not None else ""

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return function(*arguments, **options)

    call.__name__ = old
    return call


def itemset(array: np.ndarray, *arguments: Any) -> None:
    """Sets an element of an array: `itemset(value)`, `itemset(index, value)` or `itemset(row, column, value)`."""
    *place, value = arguments
    if len(place) > 1 or place and isinstance(place[0], tuple):
        array[place[0] if len(place) == 1 else tuple(place)] = value
    elif place:
        array.flat[place[0]] = value
    elif array.size == 1:
        array.flat[0] = value
    else:
        raise ValueError("can only convert an array of size 1 to a Python scalar")


def newbyteorder(array: np.ndarray, new_order: str = "S") -> np.ndarray:
    """Returns a view of the same bytes with another byte order."""
    return array.view(array.dtype.newbyteorder(new_order))


def __getattr__(name: str) -> Any:
    if name == "kernel_version":
        import platform

        return kernel_version_of(platform.release())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
