"""How gradients are cut into fragments, and which of several settings counts."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_bridge.collective.fragments import (
    DEFAULT_PERCENTAGES,
    SplitStrategies,
    SplitStrategy,
    all_reduce_bytes,
    lossless_prescale,
    max_concurrent_all_reduces,
    split_by_index,
    split_by_size,
    split_large_fragments,
)

SIZES = st.lists(st.integers(0, 10**9), max_size=60)
WEIGHTS = st.lists(st.integers(0, 100), min_size=1, max_size=10).filter(any)


def percentages_of(weights):
    return [100 * weight / sum(weights) for weight in weights]


def test_an_index_beyond_the_gradients_is_an_error_with_both_numbers():
    with pytest.raises(ValueError, match=r"up to 10, because 11 dense .* got 11") as caught:
        split_by_index(11, [3, 9, 11])
    assert "End the list with 10" in str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "percentages", "fragments"),
    [
        ([10, 20, 30, 25, 15], [25, 25, 50], [[0, 1], [2], [3, 4]]),
        ([10, 20, 30, 25, 15], [0, 100], [[0], [1, 2, 3, 4]]),
        pytest.param([40, 20, 40], [50, 50], [[0], [1, 2]], id="tie"),
        pytest.param([900, 60, 40], DEFAULT_PERCENTAGES, [[0, 1], [2]], id="default"),
        pytest.param([1], DEFAULT_PERCENTAGES, [[0]], id="one"),
    ],
)
def test_a_fragment_ends_nearest_to_its_share(sizes, percentages, fragments):
    assert split_by_size(sizes, percentages) == fragments


@given(SIZES, WEIGHTS)
def test_fragments_by_size_hold_every_gradient_once_and_in_order(sizes, weights):
    fragments = split_by_size(sizes, percentages_of(weights))
    assert list(itertools.chain(*fragments)) == list(range(len(sizes)))
    assert all(fragments)
    assert len(fragments) <= len(weights)


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=60), WEIGHTS)
def test_no_other_cut_of_a_first_fragment_is_nearer_to_its_share(sizes, weights):
    fragments = split_by_size(sizes, percentages_of(weights))
    if len(weights) > 1:
        share = sum(sizes) * percentages_of(weights)[0] / 100
        totals = list(itertools.accumulate(sizes))
        assert abs(totals[len(fragments[0]) - 1] - share) == min(abs(total - share) for total in totals)


@given(st.integers(1, 80), st.data())
def test_fragments_by_index_hold_every_gradient_once_and_in_order(count, data):
    indices = sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1)))
    fragments = split_by_index(count, indices)
    assert list(itertools.chain(*fragments)) == list(range(count))
    assert [fragment[-1] for fragment in fragments[: len(indices)]] == indices
    assert all(len(fragment) == 1 for fragment in fragments[len(indices) :])


def test_size_beats_index_and_index_beats_the_default():
    sizes = [900, 60, 40]
    assert SplitStrategy().split(sizes) == split_by_size(sizes) == split_by_size(sizes, DEFAULT_PERCENTAGES)
    assert SplitStrategy(last_indices=(0, 2)).split(sizes) == [[0], [1, 2]]
    assert SplitStrategy(last_indices=(0, 2), percentages=(100,)).split(sizes) == [[0, 1, 2]]
    assert SplitStrategy(last_indices=(7,)).split([]) == []


def test_the_first_setting_of_a_group_stays_until_it_is_forgotten():
    strategies = SplitStrategies()
    assert strategies.set_last_indices("a", [1, 2])
    assert not strategies.set_last_indices("a", [0, 2])
    assert strategies.set_percentages("a", [100])
    assert not strategies.set_percentages("a", [50, 50])
    assert strategies.strategy_of("a") == SplitStrategy((1, 2), (100,))
    assert strategies.strategy_of("b") == SplitStrategy()
    strategies.reset("a")
    assert strategies.strategy_of("a") == SplitStrategy()


@given(st.integers(1, 4096))
def test_the_prescale_is_the_largest_power_of_two_that_keeps_sums_finite(size):
    scale = lossless_prescale(size)
    assert size * scale <= 1 < size * scale * 2
    assert bin(round(1 / scale)).count("1") == 1


def test_large_fragments_fly_in_parts_that_grow_with_the_ranks():
    cut, sizes = [[0, 1, 2, 3], [4]], [3_000_000, 4_000_000, 20_000_000, 1, 2]
    assert split_large_fragments(cut, sizes, 2) == [[0, 1], [2], [3], [4]]
    assert split_large_fragments(cut, sizes, 8) == [[0, 1, 2, 3], [4]]
    assert split_large_fragments([], [], 2) == []


def test_what_flies_at_once_can_be_set(monkeypatch):
    assert max_concurrent_all_reduces() == 3
    monkeypatch.setenv("NPU_TRANSFERS_IN_FLIGHT", "5")
    monkeypatch.setenv("FUSION_TENSOR_SIZE", "10")
    assert (max_concurrent_all_reduces(), all_reduce_bytes(2), all_reduce_bytes(64)) == (5, 10, 10)
    assert split_large_fragments([[0, 1, 2]], [6, 4, 1], 2) == [[0, 1], [2]]
    for name, read in (
        ("NPU_TRANSFERS_IN_FLIGHT", max_concurrent_all_reduces),
        ("FUSION_TENSOR_SIZE", lambda: all_reduce_bytes(2)),
    ):
        for text in ("0", "-1", "1.5", "many"):
            monkeypatch.setenv(name, text)
            with pytest.raises(ValueError, match=f"{name} .*1 to .*; got '{text}'"):
                read()


@given(st.lists(st.integers(0, 20_000_000), max_size=30), st.integers(1, 9), st.integers(2, 6))
def test_parts_in_flight_keep_the_order_and_their_size(sizes, pieces, world_size):
    bounds = sorted({0, len(sizes), *(number * 7 % (len(sizes) + 1) for number in range(pieces))})
    cut = [list(range(start, end)) for start, end in zip(bounds, bounds[1:])]
    flights = split_large_fragments(cut, sizes, world_size)
    assert [position for flight in flights for position in flight] == list(range(len(sizes)))
    for flight in flights:
        assert len(flight) == 1 or sum(sizes[position] for position in flight) <= all_reduce_bytes(world_size)
        assert any(set(flight) <= set(fragment) for fragment in cut)
