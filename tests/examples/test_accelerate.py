"""The example of acceleration, run as people run it, both ways."""

from __future__ import annotations

import pytest

from npu_bridge.reporting import History
from tests.examples.commands import run_warm
from tests.reporting.chromium import assert_page

BY_STEPS = "python examples/accelerate/train.py --low bfloat16 --ratio 0.5"
BY_LOSS = "python examples/accelerate/train.py --way loss --target_loss 0.9 --ratio 1.2"


@pytest.mark.few_fast(1, "the training by loss in the same way")
@pytest.mark.parametrize(
    "command, flags", [(BY_STEPS, ["--steps", 40]), (BY_LOSS, ["--steps", 60, "--target_loss", 1.6, "--ratio", 1.25])]
)
def test_both_ways(warm_python, tmp_path, command, flags):
    said = run_warm(warm_python, command, *flags, "--output_dir", tmp_path / "out")
    rows = History(str(tmp_path / "out" / "history.jsonl")).rows
    if command is BY_STEPS:
        low, low_steps = rows[0].precision, 20  # with ", imitated" on a CPU without AVX-512
        assert low.startswith("bfloat16")
        said_low = low.replace(", imitated", " (imitated)")
        assert f"precision: steps 0-19 in {said_low}, 20-39 in float32." in said
    else:
        low, low_steps = "float16", next(step for step, row in enumerate(rows) if row.loss <= 2.0) + 1
        assert low_steps < len(rows)
        assert "precision: float16 until the loss is at most 2, then float32." in said
    assert [row.precision for row in rows] == [low] * low_steps + ["float32"] * (len(rows) - low_steps)
    assert said.count("precision: float32 from here on") == 1
    assert sum(row.loss for row in rows[-5:]) < sum(row.loss for row in rows[:5])
    assert "skipped" in (tmp_path / "out" / "curves.svg").read_text()
    page = assert_page(tmp_path / "out" / "report.html", len(rows), tmp_path / "profile")
    assert 'class="lowered"' in page and "accelerate_train_mode" in page
