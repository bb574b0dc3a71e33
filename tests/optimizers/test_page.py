"""The page about optimizers: its code runs unchanged, and every rule has a row with its defaults."""

from __future__ import annotations

import dataclasses
import pathlib
import re

import pytest

from npu_bridge.optimizers import rules
from tests.goldens.keras3_models import beside_keras3
from tests.loose_code import cut_pieces

PIECES = cut_pieces("docs/optimizers.md")
PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "optimizers.md").read_text()


@pytest.mark.parametrize(
    "number, printed",
    [pytest.param(0, "updates 2", marks=beside_keras3), (1, "updates 20 moments of dense/bias dense/kernel")],
)
def test_code_runs_as_it_stands(number, printed, capsys):
    exec(PIECES[number], {"__name__": "page"})
    assert printed in capsys.readouterr().out and len(PIECES) == 2


def test_every_rule_has_a_row_with_its_defaults():
    table = PAGE.partition("## Rules")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)\((.*?)\)` \|", table, re.MULTILINE))
    assert list(rows) == [rule.__name__ for rule in rules.ALL]
    for rule in rules.ALL:
        defaults = {field.name: field.default for field in dataclasses.fields(rule)}
        for name, value in re.findall(r"(\w+)=([^,]+)", rows[rule.__name__]):
            assert eval(value) == defaults[name], f"{rule.__name__}({name})"
