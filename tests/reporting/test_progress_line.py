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


@pytest.mark.parametrize(
    "progress, line",
    [
        (
            Progress(120, 300, 5.81234, 65536.0, 3, 12.41, precision="bfloat16", learning_rate=1.25e-4),
            "step 120/300 (40 %) | bfloat16 | loss 5.8123 | learning rate 0.000125 | loss scale 2^16 | "
            "skipped 3 steps | 12.4 steps/s | ETA 15 s",
        ),
        (Progress(7), "step 7"),
        (Progress(7, loss=2.0, steps_per_sec=4.0), "step 7 | loss 2.0000 | 4.00 steps/s"),
        (Progress(7, skipped_steps=1), "step 7 | skipped 1 step"),
        (Progress(299, 300), "step 299/300 (99 %)"),
        (Progress(301, 300, steps_per_sec=1.0), "step 301/300 (100 %) | 1.00 steps/s | ETA 0 s"),
    ],
    ids=["everything", "the step alone", "no total", "no loss scale", "a share is rounded down", "beyond the end"],
)
def test_line(progress, line):
    assert format_progress(progress) == line


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
    "format_number, number, text",
    [
        (format_secs, 0.00084, "0.84 ms"),
        (format_secs, 0.0981, "98 ms"),
        (format_secs, 0.9994, "999 ms"),
        (format_secs, 0.9996, "1 s"),
        (format_secs, 1.44, "1.4 s"),
        (format_secs, 212, "3 min 32 s"),
        (format_loss, 7.6363, "7.6363"),
        (format_loss, 0.00012345, "0.00012345"),
        (format_loss, math.nan, "nan"),
        (format_loss, 1e-9, "1.0000e-09"),
        (format_scale, 512.0, "512"),
        (format_scale, 1024.0, "2^10"),
        (format_scale, 3000.0, "3000"),
        (format_scale, 0.8, "0.8"),
        (format_scale, math.inf, "inf"),
        (format_duration, 0.4, "0 s"),
        (format_duration, 59.6, "1 min 00 s"),
        (format_duration, 7440, "2 h 04 min"),
        (format_duration, 108000, "1 d 06 h"),
        (format_rate, 0.1234, "0.12"),
        (format_rate, 9.994, "9.99"),
        (format_rate, 12.34, "12.3"),
        (format_rate, 12345.6, "12346"),
    ],
)
def test_number(format_number, number, text):
    assert format_number(number) == text


def test_skip_note_calls_early_overflow_normal():
    assert format_skip_note(2.0**16) == (
        "step skipped: gradients overflowed at loss scale 2^16; normal while a dynamic scale settles"
    )
    assert format_skip_note(None) == "step skipped: gradients were not finite"
