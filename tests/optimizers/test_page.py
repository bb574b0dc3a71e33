"""The page about optimizers: its code runs as it stands, and every rule has a row with its defaults."""

from __future__ import annotations

import dataclasses
import pathlib
import re

from npu_bridge.optimizers import rules
from tests.loose_code import run_pieces_of

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "optimizers.md").read_text()


def test_code_runs_as_it_stands(capsys):
    assert run_pieces_of("docs/optimizers.md") == 2
    printed = capsys.readouterr().out
    assert "updates 20 moments of dense/bias dense/kernel" in printed
    assert "groups [{'match': 'bias', 'weight_decay': 0.0, 'lr': 0.002}]" in printed


def test_every_rule_has_a_row_with_its_defaults():
    table = PAGE.partition("## Rules")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)\((.*?)\)` \|", table, re.MULTILINE))
    assert list(rows) == [rule.__name__ for rule in rules.ALL]
    for rule in rules.ALL:
        defaults = {field.name: field.default for field in dataclasses.fields(rule)}
        for name, value in re.findall(r"(\w+)=([^,]+)", rows[rule.__name__]):
            assert eval(value) == defaults[name], f"{rule.__name__}({name})"
