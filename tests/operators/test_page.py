"""The code of docs/operators.md runs unchanged."""

from __future__ import annotations

import re

from tests.loose_code import run_pieces_of


def test_code_runs_as_it_stands(capsys):
    assert run_pieces_of("docs/operators.md") == 1
    assert re.search(r"loss \d+\.\d+", capsys.readouterr().out)
