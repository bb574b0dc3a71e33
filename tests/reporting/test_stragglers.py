"""Which ranks count as slow, and how it is said: in sentences, in the history, on the page and at the end."""

from __future__ import annotations

import json
import pathlib

import pytest

from npu_bridge.reporting import History, StragglerHook
from npu_bridge.reporting.history import Comparison
from npu_bridge.reporting.page import write_page
from npu_bridge.reporting.progress_line import Progress, format_progress
from npu_bridge.reporting.stragglers import (
    PARTS,
    compare_ranks,
    describe_changes,
    list_slow_periods,
    list_slow_ranks,
    slowest_rank_metrics,
)
from npu_bridge.reporting.summary import StepTimes, format_ending
from tests.reporting.stepping import Clock, run_steps


def found(*own_ms, waiting=None, slow=()):
    """A comparison of ranks whose own work takes so long in each part, or in parts."""
    parts = [[ms / 1000 for ms in own] if isinstance(own, list) else [own / 1000] * PARTS for own in own_ms]
    return compare_ranks(50, 0.0, parts, waiting or [0.1] * len(parts), slow)


@pytest.mark.parametrize(
    "own_ms, slow",
    [
        ((100, 121), [1]),
        ((100, 119), []),
        ((100, 121, 100, 121), [1, 3]),
        ((100, 121, 121, 121), []),  # three of four are as ranks are
        ((100, [200, 200, 200, 200, 119], 100), []),
        ((100, [121, 300, 121, 121, 121], 100), [1]),
        ((1.0, 2.9), []),  # less than two milliseconds
        ((1.0, 3.1), [1]),
    ],
)
def test_a_slow_rank_is_a_fifth_slower_than_the_others_in_each_part(own_ms, slow):
    assert found(*own_ms).slow == slow


def test_a_rank_near_the_limit_is_told_once():
    first = found(100, 121)
    second, third = found(100, 115, slow=[1]), found(100, 109, slow=[1])
    assert (second.slow, third.slow) == ([1], [])
    assert [len(describe_changes(*pair)) for pair in ((None, first), (first, second), (second, third))] == [1, 0, 1]


def test_the_sentences():
    four = found(100, 100, 104, 148, waiting=[0.4, 0.42, 0.38, 0.1])
    assert describe_changes(None, four) == [
        "rank 3 is slow: its own work takes 148 ms a step, that of the others 100 ms (median); the others wait 30% of "
        "the time for it"
    ]
    assert describe_changes(four, found(100, 100, 104, 102)) == [
        "rank 3 is no longer slow: its own work takes 102 ms a step, that of the others 100 ms (median)"
    ]
    assert list_slow_ranks(four) == "rank 3 slow, others wait 30%"
    assert list_slow_ranks(found(100, 130, 100, 140)) == "ranks 1, 3 slow, others wait 0%"
    assert list_slow_ranks(None) is None and list_slow_ranks(found(100, 100)) is None
    line = format_progress(Progress(120, 300, 5.8, steps_per_sec=12.4, slow=list_slow_ranks(four)))
    assert line == "step 120/300 (40 %) | loss 5.8000 | rank 3 slow, others wait 30% | 12.4 steps/s | ETA 15 s"


def test_numbers_of_the_slowest_rank():
    numbers = slowest_rank_metrics(found(100, 148, 104, waiting=[0.4, 0.1, 0.38]))
    assert numbers.pop("waiting_for_slowest_rank") == pytest.approx(0.29)
    assert numbers == {"slowest_rank": 1, "slowest_rank_own_ms": 148.0, "other_ranks_own_ms": 102.0}
    assert slowest_rank_metrics(None) == {}


@pytest.fixture
def history(tmp_path):
    """Of a training in which rank 1 was slow from step 100 to 200, and is from step 300 on."""
    history = History(str(tmp_path / "history.jsonl"), Clock(per_look=0.5))
    history.begin_session(0, ranks=2)
    for step in range(50, 351, 50):
        history.append(step, 1.0, None, False)
        slow = step in (100, 150, 300, 350)
        if step != 150:
            shares = [0.4, 0.1] if slow else [0.1, 0.1]
            history.note_comparison(
                Comparison(step, history.now, [100.0, 148.0 if slow else 101.0], shares, [1] * slow)
            )
    return history


def test_the_history_has_it_and_what_is_damaged_is_left_out(history, caplog):
    history.close()
    with open(history.path, "a", encoding="utf-8") as file:
        for damage in ({"slow": [2]}, {"own_ms": [1.0]}, {"own_ms": 3}, {"waiting": [0.1, "nan"]}, {"slow": None}):
            line = {"comparison": 7, "time": 1.0, "own_ms": [1.0, 2.0], "waiting": [0.1, 0.2], "slow": []}
            file.write(json.dumps({**line, **damage}) + "\n")
    read = History(history.path)
    assert read.entries == history.entries and len(caplog.records) == 5
    assert [(first.step, rank, end) for first, rank, end in list_slow_periods(read)] == [(100, 1, 200), (300, 1, None)]
    read.begin_session(250, ranks=2)
    assert [found.step for found in History(history.path).comparisons] == [50, 100, 200, 250]


def test_page_and_ending_say_when_which_rank_was_slow(history, tmp_path):
    page = pathlib.Path(write_page(str(tmp_path), history=history)).read_text(encoding="utf-8")
    section = page.partition("<h2>Own work and waiting</h2>")[2].partition("</section>")[0]
    for cells in (["0", "100.0 ms", "40%"], ["1", "148.0 ms", "10%"]):
        assert f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>" in section
    for cells in (["1", "100", "200", "148.0 ms", "30%"], ["1", "300", "", "148.0 ms", "30%"]):
        assert f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>" in section
    lines = format_ending(history, (220, 350), 1.0, StepTimes())
    assert " ".join(line.strip() for line in lines[-2:]) == (
        "from step 300 on, rank 1 is slow: its own work takes 148 ms a step, that of the other 100 ms; the other "
        "waits 30% of the time for it"
    )
    assert max(map(len, lines[-2:])) < 80


def test_one_rank_adds_nothing_to_its_graph(tmp_path):
    hook = StragglerHook()
    run_steps([hook], [1.0] * 60)
    assert hook._gathering is None and not len(hook._moments)
