"""Ownership of variables: documented examples, and properties of every list."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_bridge.gradients.inner.ownership import fair_division


@pytest.mark.parametrize(
    "sizes, owners, expected",
    [
        ([100, 50, 50, 200], 2, [0, 0, 0, 1]),
        ([400, 100, 100, 100, 100], 4, [0, 1, 2, 2, 3]),
        # each item larger than all after it together
        ([1000, 100, 10, 1], 3, [0, 1, 2, 2]),
        # scalars weigh nothing; as many items as owners are one each
        ([0, 0, 0], 2, [0, 0, 1]),
        ([5, 0, 0], 3, [0, 1, 2]),
        ([3, 9, 2], 1, [0, 0, 0]),
    ],
)
def test_examples(sizes, owners, expected):
    assert fair_division(sizes, owners) == expected


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=40), st.data())
def test_every_owner_has_one_run(sizes, data):
    owners = data.draw(st.integers(1, len(sizes)))
    result = fair_division(sizes, owners)
    assert len(result) == len(sizes)
    assert result == sorted(result)
    assert set(result) == set(range(owners))


@given(st.integers(1, 20), st.integers(1, 10), st.integers(1, 1000))
def test_equal_sizes_are_divided_evenly(items_each, owners, size):
    result = fair_division([size] * (items_each * owners), owners)
    counts = [result.count(owner) for owner in range(owners)]
    assert max(counts) == min(counts) == items_each


@pytest.mark.parametrize("sizes, owners", [([], 1), ([1, 2, 3], 4)])
def test_more_ranks_than_gradients_are_refused(sizes, owners):
    with pytest.raises(ValueError, match=f"at least {owners} gradients.*got {len(sizes)}.*fewer ranks"):
        fair_division(sizes, owners)
