"""The arithmetic of a step's trace, checked by counting every millisecond; and traces merged over ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_bridge.reporting.step_trace import (
    StepTrace,
    Transfer,
    merge_intervals,
    set_wire_times,
    subtract_intervals,
    total_length,
)
from npu_bridge.reporting.tail_report import merge_traces

END = 24
intervals = st.lists(st.tuples(st.integers(0, END), st.integers(0, END)), max_size=8)


def cells(pairs):
    """The whole milliseconds that intervals cover."""
    return {cell for begin, end in pairs for cell in range(begin, end)}


def is_tidy(pairs):
    return all(begin < end for begin, end in pairs) and all(a[1] < b[0] for a, b in zip(pairs, pairs[1:]))


def trace(transfers, compute=(), updates=(), backward_end=0, **fields):
    given_fields = {"step": 3, "rank": 0, "start_secs": 100.0, "duration_ms": float(END), **fields}
    return StepTrace(
        backward_end_ms=backward_end, compute=compute, updates=updates, transfers=transfers, **given_fields
    )


@given(intervals, intervals)
def test_intervals_cover_what_counting_says(some, others):
    assert cells(merge_intervals(some)) == cells(some)
    assert is_tidy(merge_intervals(some))
    assert cells(subtract_intervals(some, others)) == cells(some) - cells(others)
    assert total_length(some) == len(cells(some))


@given(intervals, intervals, intervals, st.integers(0, END))
def test_exposed_is_what_is_waited_for_after_the_backward_pass_while_nothing_is_computed(
    transfers, compute, updates, backward_end
):
    sent = tuple(Transfer(f"t{number}", begin, begin, end) for number, (begin, end) in enumerate(transfers))
    step = trace(sent, compute, updates, backward_end)
    expected = {cell for cell in cells(transfers) if cell >= backward_end} - cells(compute) - cells(updates)
    assert cells(step.exposed_intervals) == expected
    assert step.exposed_ms == len(expected)


def test_gaps_are_filled_up_to_the_given_length():
    assert merge_intervals([(0, 1), (2, 3), (5, 6)], gap=1) == [(0, 3), (5, 6)]


def test_a_transfer_waits_for_the_last_rank_and_for_the_one_before():
    here = trace((Transfer("a", 1.0, 1.0, 10.0), Transfer("b", 3.0, 3.0, 12.0)))
    # This rank began 4 ms later: by the clock of the other one it hands over a at 6 ms and b at 7 ms.
    there = trace((Transfer("a", 2.0, 2.0, 6.0), Transfer("b", 3.0, 3.0, 8.0)), rank=1, start_secs=100.004)
    split_here, split_there = set_wire_times([here, there])
    assert set_wire_times([there, here]) == [split_there, split_here]
    assert [transfer.wire_ms for transfer in split_here.transfers] == pytest.approx([6.0, 10.0])
    assert [transfer.wire_ms for transfer in split_there.transfers] == pytest.approx([2.0, 6.0])


def test_a_transfer_only_one_rank_recorded_waits_for_the_one_before_alone():
    (step,) = set_wire_times([trace((Transfer("a", 0.0, 0.0, 4.0), Transfer("b", 1.0, 1.0, 6.0)))])
    assert [transfer.wire_ms for transfer in step.transfers] == [0.0, 4.0]


def test_transfers_that_horovod_joined_share_the_wire_but_fragments_never_do():
    def wire_ms(**fields):
        sent = [(1.0, 10.0), (2.0, 10.2), (7.0, 10.4)]
        transfers = tuple(Transfer(f"t{begin}", begin, begin, end, **fields) for begin, end in sent)
        first = Transfer("first", 0.0, 0.0, 5.0, **fields)
        (step,) = set_wire_times([trace((first, *transfers))])
        return [transfer.wire_ms for transfer in step.transfers]

    # The last one was handed over when the two before it were on their way.
    assert wire_ms() == [0.0, 5.0, 5.0, 10.2]
    assert wire_ms(fragment=1) == wire_ms(is_decision=True) == [0.0, 5.0, 10.0, 10.2]


@pytest.mark.parametrize(("host", "wire_ms"), [("h0", 9.0), ("h1", 6.0)])
def test_clocks_of_other_hosts_are_set_by_the_ends_of_common_transfers(host, wire_ms):
    """The other rank's clock says 4 ms more; only on another host that can be the clock's fault."""
    here = trace((Transfer("a", 1.0, 1.0, 10.0),))
    there = trace((Transfer("a", 6.0, 6.0, 10.0),), rank=1, start_secs=100.004)
    found = [
        {"rank": 0, "host": "h0", "steps": [here.as_facts()]},
        {"rank": 1, "host": host, "steps": [there.as_facts()]},
    ]
    first, _ = merge_traces(found)
    assert first.transfers[0].wire_ms == pytest.approx(min(wire_ms + (host == "h0"), 10.0))
