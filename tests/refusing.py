"""Tests of calls that are refused, as tables: what is given, the error, and what its message has to say."""

from __future__ import annotations

import functools
import inspect

import pytest

_MOST_OF_MESSAGE = 500  # characters


def refuses(*rows, says=()):
    """Makes a test of a function that has to raise an error for each row, in one short line.

    Args:
      rows: each the first arguments of the function, the error, and what its message contains: a text, or a list of
        texts. If the error comes before all rows, it is that of all.
      says: what all messages contain; then rows can end with their error.
    """
    if _is_error(rows[0]):
        rows = [(*row[:-1], rows[0], row[-1]) for row in rows[1:]]
    rows = [(*row, []) if _is_error(row[-1]) else row for row in rows]

    def decorate(function):
        @functools.wraps(function)
        def test(refusal, parts, **arguments):
            with pytest.raises(refusal) as refused:
                function(**arguments)
            said = str(refused.value)
            assert all(part in said for part in parts), said
            assert "\n" not in said and len(said) < _MOST_OF_MESSAGE, said

        names = list(inspect.signature(function).parameters)
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [inspect.Parameter(name, keyword) for name in ("refusal", "parts", *names)]
        test.__signature__ = inspect.Signature(parameters)
        texts = [[row[-1]] if isinstance(row[-1], str) else row[-1] for row in rows]
        values = [(*row[:-1], [*parts, *says]) for row, parts in zip(rows, texts)]
        given = (*names[: len(rows[0]) - 2], "refusal", "parts")
        ids = [parts[0][:40] if parts else None for parts in texts]
        return pytest.mark.parametrize(given, values, ids=ids)(test)

    return decorate


def _is_error(value):
    return all(isinstance(each, type) for each in value) if isinstance(value, tuple) else isinstance(value, type)
