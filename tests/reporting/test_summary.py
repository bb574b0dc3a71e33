"""The numbers that are left of a run."""

from __future__ import annotations

import pytest

from npu_bridge.reporting import History, format_summary, summarize
from npu_bridge.reporting.summary import StepTimes, Summary, format_ending
from tests.reporting.stepping import Clock


@pytest.fixture
def history(tmp_path):
    return History(str(tmp_path / "history.jsonl"), Clock(per_look=0.5))


def test_summary_over_a_resumed_run(history):
    history.begin_session(0, ranks=1)
    for step in range(1, 21):
        history.append(step, 100.0 - step, 8.0, False)
    history.append(20, 1e6, 8.0, True)
    history.begin_session(15, ranks=2)
    for step in range(16, 31):
        history.append(step, 100.0 - step, 4.0, step == 16)
    assert summarize(history) == Summary(
        ranks=2,
        steps=30,
        first_loss=99.0,
        last_loss=100.0 - 25.5,  # mean of steps 21 to 30
        skipped_steps=1,
        loss_scale=4.0,
        steps_per_sec=2.0,
    )


def test_skipped_steps_do_not_count_as_last_loss(history):
    history.begin_session(0)
    history.append(1, 5.0, 8.0, False)
    history.append(1, 1e6, 8.0, True)
    assert summarize(history).last_loss == 5.0


def test_session_that_did_nothing_keeps_the_old_pace(history):
    history.begin_session(0)
    for step in range(1, 5):
        history.append(step, 1.0, None, False)
    history.begin_session(4)
    assert summarize(history).steps_per_sec == 2.0


def test_empty_history(history):
    assert summarize(history) == Summary(1, 0, None, None, 0, None, None)


def test_sentence_for_people():
    assert format_summary(Summary(2, 300, 7.63626, 5.56419, 3, 65536.0, 12.844)) == (
        "trained 300 steps on 2 ranks, loss 7.6363 -> 5.5642, skipped 3 steps, loss scale 2^16, 12.8 steps/s"
    )
    assert format_summary(Summary(1, 1, None, None, 0, None, None)) == "trained 1 step on 1 rank, skipped 0 steps"


def test_times_of_steps_without_the_start_up():
    times = StepTimes()
    assert (times.median, times.worst, times.steps_per_sec) == (None, None, None)
    for secs in (9.0, 9.0, 9.0, 0.2, 0.4, 1.2):
        times.add(secs, steps=2)
    assert (times.median, times.worst, times.runs) == (0.2, 0.6, 6)
    assert times.steps_per_sec == pytest.approx(3 / 0.9)
    for _ in range(30_000):
        times.add(0.1)
    assert times.median == 0.1 and len(times._secs) <= 20_000


def test_what_a_training_says_at_its_end(history):
    history.begin_session(100, ranks=2)
    for step in range(101, 103):
        history.append(step, 9.0 - step / 100, 8.0, False)
    times = StepTimes()
    for _ in range(5):
        times.add(0.0981, 1)
    assert "\n".join(format_ending(history, (100, 102), 41.3, times)).splitlines() == [
        "trained 2 steps on 2 ranks up to step 102 in 41 s",
        "  loss 7.9900 -> 7.9850 (mean of the last 2 steps) | skipped 0 steps",
        "median step 98 ms, worst 98 ms | 2.00 steps/s",
    ]
    history.note_facts(102, samples_per_step=64, memory_bytes=dict.fromkeys(range(4), 1210000000))
    pace, memory, report = format_ending(history, (100, 102), 41.3, times, 1, "/out/a run/report.html")[1:]
    assert pace == "median step 98 ms, worst 98 ms | 320 samples | 652 samples/s"
    assert memory.splitlines() == [
        "peak memory 1.21 GB on rank 0, 1.21 GB on rank 1, 1.21 GB on rank 2",
        "  1.21 GB on rank 3",
    ]
    assert report == "report file:///out/a%20run/report.html"
