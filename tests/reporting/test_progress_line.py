"""The exact text of progress lines."""

from __future__ import annotations

import math

import pytest

from npu_bridge.reporting import Evaluation
from npu_bridge.reporting.progress_line import (
    Progress,
    format_duration,
    format_evaluation,
    format_loss,
    format_progress,
    format_rate,
    format_scale,
    format_secs,
    format_skip_note,
)


def test_line_with_everything():
    line = format_progress(Progress(120, 300, 5.81234, 65536.0, 3, 12.41))
    assert line == ("step 120/300 (40 %) | loss 5.8123 | loss scale 2^16 | skipped 3 steps | 12.4 steps/s | ETA 15 s")


def test_line_with_precision_and_learning_rate():
    progress = Progress(120, 300, 5.81234, 65536.0, precision="bfloat16", learning_rate=1.25e-4)
    parts = format_progress(progress).split(" | ")
    assert parts[1:5] == ["bfloat16", "loss 5.8123", "learning rate 0.000125", "loss scale 2^16"]


def test_samples_per_second_stay_on_a_terminal_of_80_columns_before_scale_and_rate():
    progress = Progress(120, 300, 5.81234, 65536.0, 0, 12.41, learning_rate=1e-3, samples_per_sec=794.2)
    assert format_progress(progress).endswith(" | 12.4 steps/s | 794 samples/s | ETA 15 s")
    kept = "step 120/300 (40 %) | loss 5.8123 | 12.4 steps/s | 794 samples/s | ETA 15 s"
    assert format_progress(progress, 79) == kept
    assert format_progress(progress, 70) == kept.replace(" | 794 samples/s", "")


def test_what_an_evaluation_says():
    metrics = {"accuracy": 0.73, "loss": 5.52, "mean": math.nan}
    line = "evaluation at step 200 | loss 5.5200 | accuracy 0.73 | mean nan | 12 batches in 1.4 s"
    assert format_evaluation(Evaluation(200, 0.0, metrics, "", 12, 1.43)) == line
    assert format_evaluation(Evaluation(200, 0.0, metrics, "", 12, 1.43), 79) == line.replace(" | 12", "\n  12")
    assert format_evaluation(Evaluation(7, 0.0, {}, "held-out", 1, 0.02)) == (
        "evaluation 'held-out' at step 7 | 1 batch in 20 ms"
    )


@pytest.mark.parametrize(
    "secs, text",
    [
        (0.00084, "0.84 ms"),
        (0.0981, "98 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (1.44, "1.4 s"),
        (212, "3 min 32 s"),
    ],
)
def test_short_times(secs, text):
    assert format_secs(secs) == text


def test_line_leaves_out_what_is_not_known():
    assert format_progress(Progress(7)) == "step 7"
    assert format_progress(Progress(7, loss=2.0, steps_per_sec=4.0)) == "step 7 | loss 2.0000 | 4.00 steps/s"


def test_line_without_loss_scale_still_tells_of_skipped_steps():
    assert format_progress(Progress(7, skipped_steps=1)) == "step 7 | skipped 1 step"


def test_share_done_is_rounded_down_and_never_above_100():
    assert format_progress(Progress(299, 300)).startswith("step 299/300 (99 %)")
    assert format_progress(Progress(301, 300)).startswith("step 301/300 (100 %)")


def test_time_left_is_never_negative():
    assert format_progress(Progress(301, 300, steps_per_sec=1.0)).endswith("ETA 0 s")


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (7.6363, "7.6363"),
        (0.00012345, "0.00012345"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (1e-9, "1.0000e-09"),
    ],
)
def test_loss(loss, text):
    assert format_loss(loss) == text


@pytest.mark.parametrize(
    ("scale", "text"),
    [
        (1.0, "1"),
        (512.0, "512"),
        (1024.0, "2^10"),
        (2.0**32, "2^32"),
        (3000.0, "3000"),
        (0.8, "0.8"),
        (math.inf, "inf"),
    ],
)
def test_scale(scale, text):
    assert format_scale(scale) == text


@pytest.mark.parametrize(
    ("secs", "text"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (185, "3 min 05 s"),
        (7440, "2 h 04 min"),
        (108000, "1 d 06 h"),
    ],
)
def test_duration(secs, text):
    assert format_duration(secs) == text


@pytest.mark.parametrize(("rate", "text"), [(0.1234, "0.12"), (9.994, "9.99"), (12.34, "12.3"), (12345.6, "12346")])
def test_rate(rate, text):
    assert format_rate(rate) == text


def test_skip_note_calls_early_overflow_normal():
    assert format_skip_note(2.0**16) == (
        "step skipped: gradients overflowed at loss scale 2^16; normal while a dynamic scale settles"
    )
    assert format_skip_note(None) == "step skipped: gradients were not finite"
