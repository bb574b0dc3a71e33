"""The example of boosted training, run as people run it."""

from __future__ import annotations

import re

import pytest

from tests.examples.commands import run_warm


@pytest.mark.slow("two trainings")
def test_both_trainings_learn_and_are_drawn(warm_python, tmp_path):
    printed = run_warm(warm_python, "python examples/boost/train.py", "--epochs", 1, "--out", tmp_path)
    line = r"^(plain|boosted): loss [\d.]+, accuracy [\d.]+%, updates ([\d.]+) a batch$"
    results = dict(re.findall(line, printed, re.MULTILINE))
    assert results["plain"] == "1.00" and 0.3 < float(results["boosted"]) < 0.5
    assert "boost O1: grad_freeze: 4 groups" in printed
    picture = (tmp_path / "curves.svg").read_text()
    assert picture.startswith("<?xml") and picture.count("<path") > 100
