"""Replaces `numpy.compat`, helpers for code of Python 2 and 3 that numpy had until 1.26."""

from __future__ import annotations

import io
import os
import pickle
import sys
from contextlib import nullcontext as contextlib_nullcontext
from pathlib import Path
from typing import Any

__all__ = [
    "Path", "asbytes", "asbytes_nested", "asstr", "asunicode", "asunicode_nested", "basestring", "bytes",
    "contextlib_nullcontext", "getexception", "integer_types", "is_pathlib_path", "isfileobj", "long",
    "npy_load_module", "os_PathLike", "os_fspath", "pickle", "sixu", "strchar", "unicode",
]  # fmt: skip

long, unicode, basestring, bytes = int, str, str, bytes
integer_types = (int,)
strchar = "U"
os_fspath, os_PathLike = os.fspath, os.PathLike


def asunicode(s: Any) -> str:
    """Converts a value to a text; decodes bytes as Latin-1."""
    return s.decode("latin1") if isinstance(s, bytes) else str(s)


asstr = asunicode


def asbytes(s: Any) -> bytes:
    """Converts a value to bytes; encodes texts as Latin-1."""
    return s if isinstance(s, bytes) else str(s).encode("latin1")


def asbytes_nested(x: Any) -> Any:
    """Applies `asbytes` to all elements of nested lists and tuples."""
    return _convert_nested(x, asbytes)


def asunicode_nested(x: Any) -> Any:
    """Applies `asunicode` to all elements of nested lists and tuples."""
    return _convert_nested(x, asunicode)


def _convert_nested(x: Any, convert: Any) -> Any:
    return (
        [_convert_nested(y, convert) for y in x]
        if hasattr(x, "__iter__") and not isinstance(x, (bytes, str))
        else convert(x)
    )


def sixu(s: str) -> str:
    """Returns the text unchanged."""
    return s


def isfileobj(f: Any) -> bool:
    """Returns whether an object is an open file of the operating system."""
    return isinstance(f, (io.FileIO, io.BufferedReader, io.BufferedWriter))


def is_pathlib_path(obj: Any) -> bool:
    """Returns whether an object is a `Path`."""
    return isinstance(obj, Path)


def getexception() -> Any:
    """Returns the exception being handled."""
    return sys.exc_info()[1]


def npy_load_module(name: str, fn: str, info: Any = None) -> Any:
    """Loads a module from a source file."""
    from tensorflow1_compat.old_python.old_imp import load_source

    return load_source(name, fn)
