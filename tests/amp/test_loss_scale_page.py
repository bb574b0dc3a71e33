"""The page about loss scales: its code runs unchanged, and its table has the numbers of the managers."""

from __future__ import annotations

import pathlib
import re

import pytest

from npu_bridge import amp
from tests.loose_code import cut_pieces

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "loss_scale.md"
PIECES = cut_pieces("docs/loss_scale.md")
PRINTED = {2: "skipped 5 updates 0", 3: "The first NaN or Inf comes from Log "}


@pytest.mark.parametrize("number", range(len(PIECES)))
def test_the_code_of_the_page_runs(number, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    exec(PIECES[number], {"__name__": "page"})
    assert PRINTED.get(number, "") in capsys.readouterr().out


def test_the_pieces_are_all_there():
    assert len(PIECES) == 6


def test_the_table_has_the_numbers_of_the_managers():
    rows = re.findall(
        r"^\| `DynamicLossScaleManager\.(\w+)\(\)` \| 2\^(\d+) \| × 2 after (\d+) .*? (\S+) \|$", PAGE.read_text(), re.M
    )
    assert [row[0] for row in rows] == ["apex", "mindspore", "keras"]
    for name, power, interval, bound in rows:
        constants = getattr(amp.DynamicLossScaleManager, name)().agreed_constants()
        assert constants["init_loss_scale"] == 2.0 ** int(power)
        assert constants["growth_interval"] == int(interval)
        assert (constants["growth_factor"], constants["backoff_factor"], constants["bad_steps"]) == (2.0, 0.5, 1)
        assert bound in ({"2^24"} if constants["max_loss_scale"] else {"1"})
        assert (constants["min_loss_scale"], constants["max_loss_scale"]) in ((None, 2.0**24), (1.0, None))
