"""Tests of calls that are refused, as tables: what is given, the error, and what its message has to say."""

from __future__ import annotations

import functools
import inspect

import pytest

_MOST_OF_MESSAGE = 500  # characters


def refuses(*rows):
    """Makes a test of a function that has to raise an error for each row, in one short line.

    Args:
      rows: each the first arguments of the function, the error, and what its message contains: a text, or a list of
        texts. If the error comes before all rows, it is that of all.
    """
    error = None
    if not isinstance(rows[0], tuple) or all(isinstance(each, type) for each in rows[0]):
        error, *rows = rows
    rows = [row if error is None else (*row[:-1], error, row[-1]) for row in rows]

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
        values = [(*row[:-1], parts) for row, parts in zip(rows, texts)]
        given = (*names[: len(rows[0]) - 2], "refusal", "parts")
        return pytest.mark.parametrize(given, values, ids=[parts[0][:40] for parts in texts])(test)

    return decorate
