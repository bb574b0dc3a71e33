"""The example of acceleration, run as people run it, both ways."""

from __future__ import annotations

import pytest

from npu_bridge.reporting import History
from tests.examples.commands import run_warm
from tests.reporting.chromium import assert_page


@pytest.mark.parametrize(
    "flags, low_steps",
    [
        (("--steps", "40", "--ratio", "0.75"), 30),
        (("--steps", "60", "--way", "loss", "--target_loss", "1.6", "--ratio", "1.25"), None),
    ],
)
def test_both_ways(warm_python, tmp_path, flags, low_steps):
    said = run_warm(warm_python, "python examples/accelerate/train.py", "--output_dir", tmp_path / "out", *flags)
    rows = History(str(tmp_path / "out" / "history.jsonl")).rows
    if low_steps is None:
        low_steps = next(step for step, row in enumerate(rows) if row.loss <= 2.0) + 1
        assert low_steps < len(rows)
        assert "precision: float16 until the loss is at most 2, then float32." in said
    else:
        assert "precision: steps 0-29 in float16, 30-39 in float32." in said
    assert [row.precision for row in rows] == ["float16"] * low_steps + ["float32"] * (len(rows) - low_steps)
    assert said.count("precision: float32 from here on") == 1
    assert sum(row.loss for row in rows[-5:]) < sum(row.loss for row in rows[:5])
    assert "skipped" in (tmp_path / "out" / "curves.svg").read_text()
    page = assert_page(tmp_path / "out" / "report.html", len(rows), tmp_path / "profile")
    assert 'class="lowered"' in page and "accelerate_train_mode" in page
