"""The page about boosted training: its code runs unchanged, and its tables are those of the code."""

from __future__ import annotations

import pathlib
import re

from npu_bridge.boost.config import FEATURES, LEVELS, SECTIONS
from tests.loose_code import run_pieces_of

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "boost.md").read_text()


def test_code_runs_as_it_stands(capsys):
    assert run_pieces_of("docs/boost.md") == 4
    printed = capsys.readouterr().out
    shown = [line.strip() for line in re.findall(r"^    boost O1: .*$", PAGE, re.MULTILINE)]
    assert len(shown) == 4 and all(line in printed for line in shown)
    assert "10 of 52 batch normalisations removed" in printed and "rate of the last step" in printed


def test_levels_are_those_of_the_page():
    rows = dict(re.findall(r"^\| `(O\d)` \| (.*) \|$", PAGE, re.MULTILINE))
    assert list(rows) == list(LEVELS)
    for level, features in LEVELS.items():
        assert tuple(name for name in FEATURES if f"`{name}`" in rows[level]) == features


def test_keys_and_defaults_are_those_of_the_page():
    table = PAGE.partition("| section | key |")[2].partition("\n\n")[0]
    section, found = "", {}
    for line in table.splitlines()[2:]:
        owner, keys, defaults, _ = (cell.strip() for cell in line.strip("|").split("|", 3))
        section = owner.strip("`") or section
        names, values = re.findall(r"`(\w+)`", keys), [eval(text) for text in re.findall(r"`([^`]+)`", defaults)]
        values = values if len(values) == len(names) else values * len(names)
        found.update({(section, name): value for name, value in zip(names, values)})
    assert found == {(section, name): key.default for section, keys in SECTIONS.items() for name, key in keys.items()}
