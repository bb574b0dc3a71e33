"""Runs lines of an old script as a file of the user's is run, in this process."""

from __future__ import annotations

import warnings
from typing import Any

import numpy

from tensorflow1_compat.source import compile_source, prepare_namespace


def answer_of(text: str, is_plain: bool = True) -> Any:
    """Returns the value of `answer` after these lines, with arrays and tuples as lists, and types by their names."""
    namespace: dict[str, Any] = {"__name__": "old_script"}
    prepare_namespace(namespace)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a name is to go, where it is still there
        exec(compile_source(text.encode(), "old_script.py"), namespace)
    return plain(namespace["answer"]) if is_plain else namespace["answer"]


def plain(value: Any) -> Any:
    """A value that can be compared."""
    if isinstance(value, numpy.ndarray):
        return plain(value.tolist())
    if isinstance(value, numpy.generic):
        return value.item()
    if isinstance(value, numpy.dtype):
        return str(value)
    if isinstance(value, type):
        return value.__name__
    return [*map(plain, value)] if isinstance(value, (list, tuple)) else value
