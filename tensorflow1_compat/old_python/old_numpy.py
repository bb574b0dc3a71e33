"""Functions, tables and constants that numpy 1.16 to 1.26 had and numpy 2 does not, in terms of what it has."""

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
# Types in the order in which one is looked for that holds several others.
_WIDENING, _KINDS = "?bBhHiIlLqQefdgFDGO", "buifcSUVOMm"

sctypes: dict[str, list[type]] = {
    "int": [np.int8, np.int16, np.int32, np.int64],
    "uint": [np.uint8, np.uint16, np.uint32, np.uint64],
    "float": [np.float16, np.float32, np.float64, np.longdouble],
    "complex": [np.complex64, np.complex128, np.clongdouble],
    "others": [bool, object, bytes, str, np.void],
}


def alen(a: Any) -> int:
    """The length of the first axis; 1 for a number."""
    return len(np.atleast_1d(a))


def asscalar(a: Any) -> Any:
    """The only element of an array."""
    return a.item()


def asfarray(a: Any, dtype: Any = np.float64) -> np.ndarray:
    """An array of floats: of `dtype` where that is one, else of float64."""
    return np.asarray(a, dtype if np.issubdtype(dtype, np.inexact) else np.float64)


def in1d(ar1: Any, ar2: Any, assume_unique: bool = False, invert: bool = False, **options: Any) -> np.ndarray:
    """For each element of the flat `ar1`, whether `ar2` has it."""
    return np.isin(np.asarray(ar1).ravel(), ar2, assume_unique=assume_unique, invert=invert, **options)


def msort(a: Any) -> np.ndarray:
    """A copy that is sorted along the first axis."""
    return np.sort(a, axis=0)


def fastCopyAndTranspose(a: Any) -> np.ndarray:  # noqa: N802 - its name in numpy
    """A transposed copy."""
    return np.array(np.transpose(a), order="C")


def disp(mesg: Any, device: Any = None, linefeed: bool = True) -> None:
    """Writes a text to a file, by default to standard output."""
    device = device or sys.stdout
    device.write(f"{mesg}\n" if linefeed else f"{mesg}")
    device.flush()


def source(object: Any, output: Any = None) -> None:
    """Prints the text of a function, class or module."""
    output = output or sys.stdout
    try:
        output.write(f"In file: {inspect.getsourcefile(object)}\n\n{inspect.getsource(object)}\n")
    except (OSError, TypeError):
        output.write("Not available for this object.\n")


def who(vardict: dict[str, Any] | None = None) -> None:
    """Prints names, shapes, bytes and types of the arrays in a dictionary, by default the caller's globals."""
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
    """The first two numbers of a release of Linux."""
    first, second = (release.split(".") + ["0"])[:2]
    return int(first), int("".join(filter(str.isdigit, second)) or 0)


def recfromtxt(fname: Any, **options: Any) -> Any:
    """`genfromtxt` as a record array, whose types are found out."""
    return np.genfromtxt(fname, **{"dtype": None, **options}).view(_record_type(options))


def recfromcsv(fname: Any, **options: Any) -> Any:
    """`genfromtxt` of a file with commas and a line of names, as a record array with names in small letters."""
    given = {"case_sensitive": "lower", "names": True, "delimiter": ",", "dtype": None, **options}
    return np.genfromtxt(fname, **given).view(_record_type(options))


def _record_type(options: dict[str, Any]) -> type:
    if not options.get("usemask"):
        return np.recarray
    from numpy.ma.mrecords import MaskedRecords

    return MaskedRecords


def mafromtxt(fname: Any, **options: Any) -> Any:
    """`genfromtxt` with a mask."""
    return np.genfromtxt(fname, **{**options, "usemask": True})


def ndfromtxt(fname: Any, **options: Any) -> Any:
    """`genfromtxt` without a mask."""
    return np.genfromtxt(fname, **{**options, "usemask": False})


def obj2sctype(rep: Any, default: Any = None) -> Any:
    """The type of an array's elements, of a dtype or of what can become one; else `default`."""
    if isinstance(rep, type) and issubclass(rep, np.generic):
        return rep
    if isinstance(rep, np.ndarray):
        return rep.dtype.type
    try:
        return np.dtype(rep).type
    except Exception:
        return default


def issctype(rep: Any) -> bool:
    """Whether something is the type of an array's elements, other than of objects."""
    return isinstance(rep, (type, np.dtype)) and obj2sctype(rep) not in (None, np.object_)


def issubclass_(arg1: Any, arg2: Any) -> bool:
    """`issubclass`, false for what is no class."""
    try:
        return issubclass(arg1, arg2)
    except TypeError:
        return False


def issubsctype(arg1: Any, arg2: Any) -> bool:
    """Whether the elements of one are of a type below those of the other."""
    return issubclass(obj2sctype(arg1), obj2sctype(arg2))


def sctype2char(sctype: Any) -> str:
    """The letter of a type.

    Raises:
      ValueError: it is no type of elements.
      KeyError: it is an abstract one.
    """
    found = obj2sctype(sctype)
    if found is None:
        raise ValueError("unrecognized type")
    if found not in {np.dtype(letter).type for letter in np.typecodes["All"]}:
        raise KeyError(found)
    return np.dtype(found).char


def maximum_sctype(t: Any) -> Any:
    """The longest type of the same kind; of others, the type itself."""
    found = obj2sctype(t)
    if found is None:
        return t
    kind = {"i": "int", "u": "uint", "f": "float", "c": "complex"}.get(np.dtype(found).kind)
    return sctypes[kind][-1] if kind else found


def find_common_type(array_types: Iterable[Any], scalar_types: Iterable[Any]) -> Any:
    """The type that holds all of `array_types`, and those of `scalar_types` that are of a higher kind; else None."""
    of_arrays = _holding_all([*map(np.dtype, array_types)])
    of_scalars = _holding_all([*map(np.dtype, scalar_types)])
    if of_arrays is None or of_scalars is None:
        return of_scalars if of_arrays is None else of_arrays
    if _KINDS.find(of_scalars.kind) <= _KINDS.find(of_arrays.kind):
        return of_arrays
    if of_scalars > of_arrays:
        return of_scalars
    start = _WIDENING.find(of_scalars.char)
    return None if start < 0 else _holding_all([of_scalars, of_arrays], start)


def _holding_all(types: list[np.dtype], start: int = 0) -> Any:
    if len(types) < 2:
        return types[0] if types else None
    wider = map(np.dtype, _WIDENING[start:])
    return next((one for one in wider if all(one >= each for each in types)), None)


class _ByType(dict):
    """Values by types of elements, which may be asked for by anything that is a type: "f", float, np.float32."""

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(obj2sctype(key))


_CONCRETE = [np.dtype(letter).type for letter in "?bhilqBHILQefdgFDGSUVOMm"]
cast = _ByType({kind: lambda values, kind=kind: np.asarray(values).astype(kind) for kind in _CONCRETE})
nbytes = _ByType({kind: np.dtype(kind).itemsize for kind in _CONCRETE})


def get_array_wrap(*arguments: Any) -> Any:
    """`__array_wrap__` of the argument with the highest priority; None where nobody has one."""
    having = [value for value in arguments if hasattr(value, "__array_wrap__")]
    return max(having, key=lambda v: getattr(v, "__array_priority__", 0)).__array_wrap__ if having else None


def geterrobj() -> list[Any]:
    """Size of the buffers, reactions to errors as one number, and what is called."""
    mask = sum(_REACTIONS.index(reaction) << _ERRORS[error] for error, reaction in np.geterr().items())
    return [np.getbufsize(), mask, np.geterrcall()]


def seterrobj(errobj: list[Any]) -> None:
    """Sets what `geterrobj` gives."""
    size, mask, function = errobj
    np.setbufsize(size)
    np.seterr(**{error: _REACTIONS[mask >> shift & 7] for error, shift in _ERRORS.items()})
    np.seterrcall(function)


def deprecate(*arguments: Any, **options: Any) -> Any:
    """A function that warns when it is called, or a decorator that makes one.

    Args:
      arguments: a function first, or none; then `old_name`, `new_name` and `message`.
      options: these by name.
    """
    if arguments:
        return _deprecated(*arguments, **options)
    return lambda function: _deprecated(function, **options)


def deprecate_with_doc(msg: str) -> Callable:
    """A decorator of functions that warn when they are called."""
    return lambda function: _deprecated(function, message=msg)


def _deprecated(function: Any, old_name: Any = None, new_name: Any = None, message: Any = None) -> Any:
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
    """`array.itemset(value)`, `array.itemset(place, value)`, `array.itemset(row, column, value)`."""
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
    """The same bytes, read in another order."""
    return array.view(array.dtype.newbyteorder(new_order))


def __getattr__(name: str) -> Any:
    if name == "kernel_version":
        import platform

        return kernel_version_of(platform.release())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
