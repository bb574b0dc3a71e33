"""Every module says in its first sentence what it does; `make modules` prints these sentences."""

from __future__ import annotations

import functools
import re
import subprocess
import sys

import pytest

from tests.loose_code import REPOSITORY, module_at

# A sentence begins with what the module does or is, not with a word that only points at it.
POINTERS = {"This", "That", "These", "Those", "It", "Its", "Here", "There", "Todo"}


@functools.cache
def sentences() -> dict[str, str]:
    """The first sentence of every module, read when the first test wants it."""
    return module_at("tools/module_list.py").sentences()


def problems_of(sentence: str) -> list[str]:
    """Returns the words that keep a sentence from telling a reader what its module does."""
    first_word = re.match(r"\w*", sentence).group()
    found = {
        "it is missing": not sentence,
        "it is shorter than a name": 0 < len(sentence) < 8,
        "it is longer than a line": len(sentence) > 120,
        "it does not end like a sentence": not sentence.endswith("."),
        "it begins with neither a capital letter nor code": not re.match(r"[A-Z`]", sentence),
        f"it begins with {first_word!r}, which says nothing": first_word in POINTERS,
    }
    return [problem for problem, is_so in found.items() if is_so]


def test_every_module_says_what_it_does():
    assert len(sentences()) > 500
    assert {path: problems for path in sentences() if (problems := problems_of(sentences()[path]))} == {}


def test_no_two_modules_say_the_same():
    paths = {}
    for path, sentence in sentences().items():
        paths.setdefault(sentence.lower(), []).append(path)
    assert [several for several in paths.values() if len(several) > 1] == []


@pytest.mark.parametrize(
    "sentence",
    ["", "Ops.", "reads files.", "Reads files", "This module reads files.", "Reads " + "many " * 30 + "files."],
)
def test_what_is_a_problem(sentence):
    assert problems_of(sentence)


def test_the_list_has_a_line_for_every_module():
    command = [sys.executable, "tools/module_list.py"]
    printed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    lines = printed.splitlines()
    for path, sentence in sentences().items():
        folder, _, name = path.rpartition("/")
        assert f"{folder}/" in lines and f"  {name}: {sentence}" in lines
    assert "tools/module_list.py" in (REPOSITORY / "Makefile").read_text(encoding="utf-8")
