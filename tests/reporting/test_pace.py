"""Steps per second from injected times."""

from __future__ import annotations

from npu_bridge.reporting.progress_hook import StepRate


def test_recent_pace_forgets_what_is_outside_its_window():
    pace = StepRate(window=2)
    for steps, now in [(0, 0.0), (10, 10.0), (20, 11.0), (40, 12.0)]:
        pace.record_steps(steps, now)
    assert pace.recent_rate == 15.0
    assert pace.overall_steps_per_sec == 40 / 12
