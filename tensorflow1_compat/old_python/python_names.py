"""Restores functions of Python 3.5 to 3.11 that were removed or now refuse some arguments."""

from __future__ import annotations

import fractions
import importlib.util
import locale
import math
import operator
import random
import sys
import unittest
from collections.abc import Callable
from typing import Any

from tensorflow1_compat.journal import say_once


def gcd(a: Any, b: Any) -> Any:
    """Returns the greatest common divisor of integers or fractions, with the sign of `b`, or of `a` if `b` is 0."""
    if type(a) is int is type(b):
        return -math.gcd(a, b) if (b or a) < 0 else math.gcd(a, b)
    while b:
        a, b = b, a % b
    return a


def dist(*_: Any, **__: Any) -> tuple[str, str, str]:
    """Returns (short name, version, code name) of the Linux distribution, as `platform.dist` did; "" if unknown."""
    from tensorflow1_compat.old_python.shims import linux_distribution

    name, version, code_name = linux_distribution()
    return name.partition(" ")[0].lower(), version, code_name


def find_loader(fullname: str, path: Any = None) -> Any:
    """Returns the loader of a module or None, as `importlib.find_loader` and `pkgutil.find_loader` did."""
    if path is not None:
        found = importlib.machinery.PathFinder.find_spec(fullname, path)
        return found and found.loader
    try:
        found = importlib.util.find_spec(fullname)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ImportError(f"Error while finding loader for {fullname!r} ({type(error)}: {error})") from error
    return found and found.loader


def get_loader(module_or_name: Any) -> Any:
    """Returns the loader of a module, given as an object or by name, as `pkgutil.get_loader` did; else None."""
    if isinstance(module_or_name, str):
        module_or_name = sys.modules.get(module_or_name, module_or_name)
        if module_or_name is None:
            return None
    if isinstance(module_or_name, str):
        return find_loader(module_or_name)
    spec = getattr(module_or_name, "__spec__", None)
    return getattr(module_or_name, "__loader__", None) or (
        spec.loader if spec else find_loader(module_or_name.__name__)
    )


def format_number(format: str, value: Any, grouping: bool = False, monetary: bool = False, *additional: Any) -> str:
    """Formats a number by a `%` specifier for the locale, as `locale.format` did.

    Raises:
      ValueError: the format is not a single `%` specifier.
    """
    if not format.startswith("%") or format.count("%") > 1 or not format[-1].isalpha():
        raise ValueError(f'format() must be given exactly one %char format specifier, "{format}" not valid')
    return locale.format_string(format, (value, *additional), grouping, monetary)


def resetlocale(category: int = locale.LC_ALL) -> None:
    """Sets the locale that the environment requests, as `locale.resetlocale` did."""
    locale.setlocale(category, "")


def _make_test_loader(prefix: str, sort_using: Callable | None, suite: type) -> unittest.TestLoader:
    loader = unittest.TestLoader()
    loader.testMethodPrefix, loader.suiteClass = prefix, suite
    if sort_using is not None:
        loader.sortTestMethodsUsing = sort_using
    return loader


def make_suite(
    test_case: type, prefix: str = "test", sort_using: Callable | None = None, suite: type = unittest.TestSuite
) -> Any:
    """Makes a suite of the tests in a class, as `unittest.makeSuite` did."""
    return _make_test_loader(prefix, sort_using, suite).loadTestsFromTestCase(test_case)


def find_test_cases(
    module: Any, prefix: str = "test", sort_using: Callable | None = None, suite: type = unittest.TestSuite
) -> Any:
    """Makes a suite of the tests in a module, as `unittest.findTestCases` did."""
    return _make_test_loader(prefix, sort_using, suite).loadTestsFromModule(module)


def get_test_case_names(test_case: type, prefix: str, sort_using: Callable | None = None, *_: Any) -> list[str]:
    """Returns the names of the tests in a class, as `unittest.getTestCaseNames` did."""
    return list(_make_test_loader(prefix, sort_using, unittest.TestSuite).getTestCaseNames(test_case))


def assert_count_equal(test: unittest.TestCase, *arguments: Any, **options: Any) -> None:
    """Calls `assertCountEqual`; replaces `assertItemsEqual`, a method of Python 2 that TensorFlow's tests use."""
    test.assertCountEqual(*arguments, **options)


def assert_dict_contains_subset(test: unittest.TestCase, subset: Any, dictionary: Any, msg: Any = None) -> None:
    """Fails a test unless a dictionary has all entries of `subset`."""
    test.assertEqual({**dictionary, **subset}, dict(dictionary), msg)


def children_of(element: Any) -> list[Any]:
    """Returns the children of an element, as `Element.getchildren` did."""
    return list(element)


def elements_of(element: Any, tag: Any = None) -> list[Any]:
    """Returns an element and all elements below it, or only those with a tag, as `Element.getiterator` did."""
    return list(element.iter(tag))


def unescape(_: Any, text: str) -> str:
    """Decodes HTML entities, as `HTMLParser.unescape` did."""
    import html

    return html.unescape(text)


def read_fp(parser: Any, fp: Any, filename: str | None = None) -> None:
    """Reads an open file, as `ConfigParser.readfp` did."""
    parser.read_file(fp, source=filename)


def seed(a: Any = None, version: int = 2) -> None:
    """Calls `random.seed`; also accepts other hashable values, such as numpy integers and tuples."""
    if not isinstance(a, (type(None), int, float, str, bytes, bytearray)):
        say_once(
            "random.seed of other than numbers and texts",
            "refused since Python 3.11; the value's hash is used, as before",
        )
        a = hash(a)
    random.seed(a, version)


def shuffle(x: Any, random_function: Callable[[], float] | None = None, **options: Any) -> None:
    """Calls `random.shuffle`; also accepts a function that returns random numbers from 0 to 1."""
    draw = options.get("random", random_function)
    if draw is None:
        return random.shuffle(x)
    say_once("random.shuffle(x, random)", "gone since Python 3.11; the order is unchanged")
    for i in reversed(range(1, len(x))):
        j = int(draw() * (i + 1))
        x[i], x[j] = x[j], x[i]
    return None


def _integral_as_int(function: str, value: Any, refused_since: tuple[int, int] = (3, 12)) -> Any:
    """Converts an integral float to an integer if this Python refuses floats; returns other values unchanged."""
    if sys.version_info < refused_since:
        return value
    try:
        return operator.index(value)
    except TypeError:
        if not isinstance(value, (float, fractions.Fraction)) or value != int(value):
            return value
    remark = f"refused since Python {'.'.join(map(str, refused_since))}; the same number as an integer is used"
    say_once(f"{function} of a float", remark)
    return int(value)


def randint(a: Any, b: Any) -> int:
    """Calls `random.randint`; also accepts integral floats."""
    return random.randint(_integral_as_int("random.randint", a), _integral_as_int("random.randint", b))


def randrange(start: Any, stop: Any = None, step: Any = 1) -> int:
    """Calls `random.randrange`; also accepts integral floats."""
    start, step = _integral_as_int("random.randrange", start), _integral_as_int("random.randrange", step)
    return random.randrange(start, None if stop is None else _integral_as_int("random.randrange", stop), step)


def factorial(x: Any) -> int:
    """Calls `math.factorial`; also accepts an integral float."""
    return math.factorial(_integral_as_int("math.factorial", x, (3, 10)))
