"""Makes messages of five parts: the place, the problem, the expected value, the given value, and the cure."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Callable, TypeVar

from npu_bridge.base.terminal import echo, logger

_Function = TypeVar("_Function", bound=Callable[..., Any])
_log = logger(__name__)
LONGEST_MESSAGE = 499  # characters, including quoted values
_LONGEST_VALUE = 80
_MOST_PARTS = 8
_PART_LIMITS = (LONGEST_MESSAGE, 240, 160, 120, 90)  # five parts of the last length fit, with the words between them


def message(where: str, problem: str, expected: str, got: str, fix: str) -> str:
    """Returns a five-part message: one line of at most `LONGEST_MESSAGE` characters. Long parts lose their middle."""
    parts = [str(part) for part in (where, problem, expected, got, fix)]
    for limit in _PART_LIMITS:
        where, problem, expected, got, fix = (shortened(part, limit) for part in parts)
        text = f"{where}: {problem}. Expected {expected}; got {got}. {fix}".rstrip()
        if len(text) <= LONGEST_MESSAGE:
            break
    return text


def shortened(text: str, max_length: int = LONGEST_MESSAGE) -> str:
    """Returns a text of at most `max_length` characters; a longer text has dots in place of its middle."""
    if len(text) <= max_length:
        return text
    tail = (max_length - 5) // 3
    return f"{text[: max_length - 5 - tail]} ... {text[len(text) - tail :]}"


def shown(value: Any) -> str:
    """Returns a value for a message: its repr, shortened to a readable length, and its type."""
    try:
        text = repr(value)
    except Exception:  # a number with very many digits, or an object whose own repr fails
        text = "a value that cannot be printed"
    return f"{shortened(text, _LONGEST_VALUE)} ({type(value).__name__})"


def listed(names: Sequence[str], max_names: int = 3) -> str:
    """Returns the first `max_names` names for a message, and the number of the other names."""
    more = f" and {len(names) - max_names} more" if len(names) > max_names else ""
    return f"{', '.join(names[:max_names])}{more}"


def option_error(
    kind: type[Exception], where: str, option: str, problem: str, expected: str, got: str, fix: str
) -> Exception:
    """Returns an exception with a five-part message and the name of its option.

    Args:
      kind: `ValueError` or `TypeError`.
      where: the class or map the option was given to.
      option: the option's name; becomes the error's attribute `option`, for a caller that knows the option's line.
      problem: what is wrong, starting with the option's name.
      expected: the allowed values.
      got: the given value.
      fix: one sentence with the cure.
    """
    error = kind(message(where, problem, expected, got, fix))
    error.option = option  # type: ignore[attr-defined]
    return error


def unknown_name_error(
    kind: type[Exception], where: str, name: str, known_names: Iterable[str], fix: str = ""
) -> Exception:
    """Returns the error for an unknown option, with the nearest known name unless a fix is given."""
    known_names = list(known_names)
    fix = fix or did_you_mean(name, known_names, "Remove it; docs/options.md lists every option.")
    problem = f"unknown option {shortened(name, _LONGEST_VALUE)!r}"
    return option_error(kind, where, name, problem, f"one of {len(known_names)} options", repr(name), fix)


def nearest_word(word: Any, known_words: Iterable[str]) -> str | None:
    """Returns the known word that looks most like `word`, or None if no word is similar.

    A known word that has all parts of `word` comes first: "mixed_fp16" means "allow_mix_precision_fp16", although
    "force_fp16" is shorter.
    """
    by_lower_case = {candidate.lower(): candidate for candidate in known_words}
    given = shortened(str(word).lower())
    parts = _split_words(given)
    holding = [
        each
        for each in by_lower_case
        if 1 < len(parts) <= _MOST_PARTS and _has_similar_parts(_split_words(each), parts)
    ]
    found = difflib.get_close_matches(given, holding or by_lower_case, n=1, cutoff=0.0 if holding else 0.6)
    return by_lower_case[found[0]] if found else None


def _split_words(word):
    return re.findall(r"[a-z0-9]+", word)


def _has_similar_parts(parts, wanted):
    return all(any(difflib.SequenceMatcher(None, one, part).ratio() >= 0.75 for part in parts) for one in wanted)


def did_you_mean(word: Any, known_words: Iterable[str], otherwise: str) -> str:
    """Returns the cure for an unknown word: the nearest known word, or `otherwise` if no word is similar."""
    near = nearest_word(word, known_words)
    return f"Did you mean {near!r}?" if near else otherwise


def unknown_keyword(owner: str, name: str, known_keywords: Iterable[str], fix: str = "") -> TypeError:
    """Returns the error for an unknown argument, with the nearest known argument unless a fix is given."""
    known_keywords = list(known_keywords)
    takes = f"one of {', '.join(known_keywords)}" if known_keywords else "no argument"
    fix = fix or did_you_mean(name, known_keywords, "Remove it.")
    return TypeError(message(owner, f"unknown argument {shortened(name, _LONGEST_VALUE)!r}", takes, repr(name), fix))


def refuse_unknown_keywords(fixes: Mapping[str, Callable[[Any], str]]) -> Callable[[_Function], _Function]:
    """Returns a decorator of functions that raises TypeError for unknown keywords; `fixes` as in `check_keywords`."""

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def checked(*arguments, **keywords):
            check_keywords(function.__name__, signature, keywords, fixes)
            return function(*arguments, **keywords)

        return checked  # type: ignore[return-value]

    return decorate


def signature_of_class(made_class: type) -> inspect.Signature:
    """Returns the signature of a class's constructor, without `self`."""
    init = made_class.__init__  # type: ignore[misc]
    if init is object.__init__:
        return inspect.Signature()
    return inspect.Signature(list(inspect.signature(init).parameters.values())[1:])


class KeywordChecksMixin:
    """A base class whose constructor, also in subclasses, suggests the nearest argument for a misspelt one.

    Attributes:
      other_keywords: arguments of other interfaces, each with a function that takes its value and returns the cure.
    """

    other_keywords: Mapping[str, Callable[[Any], str]] = MappingProxyType({})

    def __new__(cls, *arguments: Any, **keywords: Any):
        del arguments
        check_keywords(cls.__name__, signature_of_class(cls), keywords, cls.other_keywords)
        return super().__new__(cls)


def check_keywords(
    owner: str, signature: inspect.Signature, keywords: Mapping[str, Any], fixes: Mapping[str, Callable[[Any], str]]
) -> None:
    """Raises TypeError for a keyword that a function does not take, with its fix if the keyword is in `fixes`."""
    parameters = signature.parameters
    is_open = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    for name in () if is_open else keywords:
        if name not in parameters:
            raise unknown_keyword(owner, name, parameters, fixes[name](keywords[name]) if name in fixes else "")


@functools.cache
def say_once(level: int, text: str) -> None:
    """Logs a line; repeated calls with this line log nothing."""
    _log.log(level, "%s", text)


@functools.cache
def say_on_terminal(text: str) -> None:
    """Prints a line on standard error; repeated calls with this line print nothing."""
    echo(text, err=True)
