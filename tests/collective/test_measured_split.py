"""The split for measured speeds: against every possible cut, through the transfers that are really made."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_bridge.collective import groups
from npu_bridge.collective.fragments import SplitStrategies, SplitStrategy, cut_for_flight
from npu_bridge.collective.measured_split import Speeds, fastest_cut

seconds = st.floats(0.0, 3.0)
speeds_of_a_job = st.builds(Speeds, seconds, seconds, st.floats(0.0, 0.2), seconds)


def step_secs(cut, sizes_bytes, speeds, ranks):
    """Goes through the transfers one by one."""
    shares = [size / sum(sizes_bytes) for size in sizes_bytes]
    arrived, ready = 0.0, speeds.ready_secs(shares)
    for transfer in cut_for_flight(cut, sizes_bytes, ranks):
        arrived = max(arrived, ready[transfer[-1]]) + speeds.secs_of_transfer(sum(shares[place] for place in transfer))
    return max(arrived, speeds.forward_secs + speeds.backward_secs)


def every_cut(count):
    for inner in range(min(count, 8)):
        for ends in itertools.combinations(range(1, count), inner):
            bounds = [0, *ends, count]
            yield [list(range(start, end)) for start, end in zip(bounds, bounds[1:])]


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(200_000, 20_000_000), min_size=1, max_size=8), speeds_of_a_job, st.integers(2, 4))
def test_no_cut_is_faster(sizes_bytes, speeds, ranks):
    found = fastest_cut(sizes_bytes, speeds, ranks)
    assert [place for fragment in found for place in fragment] == list(range(len(sizes_bytes)))
    times = [(step_secs(cut, sizes_bytes, speeds, ranks), len(cut)) for cut in every_cut(len(sizes_bytes))]
    shortest = min(times)[0]
    assert step_secs(found, sizes_bytes, speeds, ranks) <= shortest * 1.0051 + 1e-12
    # No cut of fewer fragments comes as close.
    assert all(secs > shortest * 1.0049 for secs, count in times if count < len(found))


def test_a_short_tail_where_everything_else_hides_and_one_fragment_where_each_transfer_is_dear():
    sizes_bytes = [1_000_000] * 40
    hidden = fastest_cut(sizes_bytes, Speeds(1.0, 2.0, 0.001, 1.0), 8)
    assert len(hidden) > 1
    assert len(hidden[-1]) <= 2
    assert len(fastest_cut(sizes_bytes, Speeds(0.0, 0.0, 0.1, 0.001), 8)) == 1
    assert fastest_cut([], Speeds(1.0, 1.0, 1.0, 1.0), 2) == []


def test_thousands_of_gradients_are_cut_quickly_and_whole():
    sizes_bytes = [17, 5_000_000, 3] * 1000
    cut = fastest_cut(sizes_bytes, Speeds(0.1, 0.2, 0.001, 0.3), 2)
    assert [place for fragment in cut for place in fragment] == list(range(3000))


def test_what_a_script_sets_beats_what_was_measured():
    measured = SplitStrategy(measured=lambda sizes_bytes: [list(range(len(sizes_bytes)))])
    strategies = SplitStrategies({"world": measured})
    assert strategies.of("world").cut([1, 1, 1]) == [[0, 1, 2]]
    assert strategies.of("other").cut([10, 10, 1]) == [[0, 1], [2]]
    strategies.set_last_indices("world", [0, 2])
    assert strategies.of("world").cut([1, 1, 1]) == [[0], [1, 2]]
    strategies.forget("world")
    assert strategies.of("world").cut([1, 1, 1]) == [[0, 1, 2]]


def test_speeds_travel_to_the_ranks_as_text(monkeypatch):
    speeds = Speeds(0.25, 0.5, 0.001, 2.0)
    monkeypatch.setenv("NPU_RUN_SPLIT", speeds.as_text())
    sizes_bytes = [8_000_000] * 12
    assert groups.Groups().strategies.of(groups.WORLD).cut(sizes_bytes) == fastest_cut(sizes_bytes, speeds, 1)
    monkeypatch.delenv("NPU_RUN_SPLIT")
    assert groups.Groups().strategies.of(groups.WORLD) == SplitStrategy()


@pytest.mark.parametrize("value", [-0.1, float("inf"), float("nan"), "1"])
def test_what_is_no_time_is_refused(value):
    with pytest.raises(ValueError, match="exchange_secs is no time. Expected a number of seconds"):
        Speeds(0.0, 0.0, 0.0, value)


def test_what_was_chosen_is_said_once(monkeypatch, capsys):
    monkeypatch.setenv("NPU_RUN_SPLIT", Speeds(0.25, 0.5, 0.001, 2.0).as_text())
    strategy = groups.Groups().strategies.of(groups.WORLD)
    shares = [round(100 * len(fragment) / 12) for fragment in strategy.cut([9_000_000] * 12)]
    strategy.cut([9_000_000] * 12)
    fragments = f"{len(shares)} fragment{'s' if len(shares) > 1 else ''}"
    expected = f"npu-run --split: 108.0 MB of gradients in {fragments}: {', '.join(f'{share} %' for share in shares)}\n"
    assert capsys.readouterr().err == expected
