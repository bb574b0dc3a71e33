"""Matches the operators of two dumps by name; operators can be renamed or fused in one of the dumps."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_LONGEST_FUSED = 4000  # characters


class OperatorMatching(NamedTuple):
    """The result of matching the operators of A to the operators of B.

    Attributes:
      pairs: dict from names in A to names in B.
      how: for pairs with different names, the rule that matched them: "given", "renamed", "fused" or "scope".
      inside: dict from each operator of A inside a fused operator of B to the fused operator.
      only_a, only_b: unmatched operators, in the order of execution.
    """

    pairs: dict[str, str]
    how: dict[str, str]
    inside: dict[str, str]
    only_a: list[str]
    only_b: list[str]


def convert_to_file_name(name: str) -> str:
    """Converts a name to the form used in file names: `. / \\ :` and blanks become underscores."""
    return re.sub(r"[./\\: ]", "_", name).strip("_")


def match_operators(
    a: Sequence[str], b: Sequence[str], given_pairs: Mapping[str, str] | None = None
) -> OperatorMatching:
    """Matches operators by their names.

    The first rule that finds exactly one partner counts. The rules: the pair was given; the names are equal; the names
    are equal as file names; one name joins the names of several operators of the other dump, as after fusing, and is
    paired with the last of them; one name has additional scopes in front.

    Args:
      a, b: names in the order of execution, each once.
      given_pairs: dict from names of A to names of B.
    """
    pairs: dict[str, str] = {}
    how: dict[str, str] = {}
    inside: dict[str, str] = {}
    free_a, free_b = dict.fromkeys(a), dict.fromkeys(b)

    def add_pair(name_a: str, name_b: str, rule: str = "") -> None:
        pairs[name_a] = name_b
        if rule:
            how[name_a] = rule
        free_a.pop(name_a, None)
        free_b.pop(name_b, None)

    for of_a, of_b in (given_pairs or {}).items():
        if of_a in free_a and of_b in free_b:
            add_pair(of_a, of_b, "given")
    for name in [name for name in free_a if name in free_b]:
        add_pair(name, name)
    for of_a, of_b in _pair_by_unique_key(free_a, free_b, convert_to_file_name):
        add_pair(of_a, of_b, "renamed")
    for of_b, parts in _find_fused_names(free_b, free_a).items():
        add_pair(parts[-1], of_b, "fused")
        for part in parts[:-1]:
            inside[part] = of_b
            free_a.pop(part)
    for of_a, parts in _find_fused_names(free_a, free_b).items():
        add_pair(of_a, parts[-1], "fused")
        for part in parts[:-1]:
            free_b.pop(part, None)
    for of_a, of_b in _pair_by_scope(free_a, free_b):
        add_pair(of_a, of_b, "scope")
    return OperatorMatching(pairs, how, inside, list(free_a), list(free_b))


def _pair_by_unique_key(unmatched_a, unmatched_b, key_of) -> list[tuple[str, str]]:
    """Returns pairs of names for which `key_of` returns the same value, if it returns this value for no other name."""
    of_b: dict[str, list[str]] = defaultdict(list)
    of_a: dict[str, list[str]] = defaultdict(list)
    for names, found in ((unmatched_a, of_a), (unmatched_b, of_b)):
        for name in names:
            found[key_of(name)].append(name)
    return [(names[0], of_b[form][0]) for form, names in of_a.items() if len(names) == len(of_b.get(form, ())) == 1]


def _find_fused_names(candidates, names) -> dict[str, list[str]]:
    """Returns a dict from each candidate that joins two or more of `names` to these names; uses each name once."""
    known: dict[str, str] = {}
    for name in names:
        known.setdefault(convert_to_file_name(name), name)
    lengths = sorted({len(form) for form in known}, reverse=True)
    found, used = {}, set()
    for candidate in list(candidates):
        form = convert_to_file_name(candidate)
        parts = _split_into_words(form, known, lengths) if len(form) <= _LONGEST_FUSED else None
        if parts and len(parts) > 1 and not used.intersection(parts):
            used.update(parts)
            found[candidate] = parts
    return found


def _split_into_words(text: str, known_words: Mapping[str, str], lengths: Sequence[int]) -> list[str] | None:
    """Splits a text into known words, which underscores can separate; tries long words first."""
    ways: dict[int, tuple[int, str]] = {0: (-1, "")}  # place: where the word that ends there begins, and its name
    for at in range(len(text)):
        if at not in ways:
            continue
        if text[at] == "_" and at + 1 not in ways:
            ways[at + 1] = (at, "")
        for length in lengths:
            end = at + length
            if end <= len(text) and end not in ways and text[at:end] in known_words:
                ways[end] = (at, known_words[text[at:end]])
    if len(text) not in ways:
        return None
    parts, at = [], len(text)
    while at > 0:
        at, name = ways[at]
        if name:
            parts.append(name)
    return parts[::-1] if len(set(parts)) == len(parts) else None


def _pair_by_scope(free_a, free_b) -> list[tuple[str, str]]:
    """Returns pairs in which one name is the other name with scopes in front; omits names with several partners."""
    found: list[tuple[str, str]] = []
    for shorts, longs, is_swapped in ((free_a, free_b, False), (free_b, free_a, True)):
        by_end: dict[str, list[str]] = defaultdict(list)
        for long in longs:
            words = convert_to_file_name(long).split("_")
            for first in range(1, len(words)):
                by_end["_".join(words[first:])].append(long)
        taken = {pair[is_swapped] for pair in found} | {pair[not is_swapped] for pair in found}
        partner = {short: by_end.get(convert_to_file_name(short), []) for short in shorts}
        wanted = Counter(ends[0] for ends in partner.values() if len(ends) == 1)
        for short, ends in partner.items():
            if len(ends) == 1 and wanted[ends[0]] == 1 and not taken.intersection((short, ends[0])):
                found.append((ends[0], short) if is_swapped else (short, ends[0]))
    return found
