"""Steps per second from injected times."""

from __future__ import annotations

from npu_bridge.reporting.progress_hook import StepRate


def test_unknown_before_the_second_mark():
    pace = StepRate()
    assert pace.recent_rate is None and pace.overall_steps_per_sec is None
    pace.record_steps(1, 10.0)
    assert pace.recent_rate is None and pace.overall_steps_per_sec is None


def test_recent_pace_forgets_what_is_outside_its_window():
    pace = StepRate(window=2)
    for steps, now in [(0, 0.0), (10, 10.0), (20, 11.0), (40, 12.0)]:
        pace.record_steps(steps, now)
    assert pace.recent_rate == 15.0
    assert pace.overall_steps_per_sec == 40 / 12


def test_marks_at_the_same_time_give_no_pace():
    pace = StepRate()
    pace.record_steps(1, 5.0)
    pace.record_steps(2, 5.0)
    assert pace.overall_steps_per_sec is None
