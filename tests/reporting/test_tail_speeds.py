"""Speeds read from recorded steps."""

from __future__ import annotations

import pytest

from npu_bridge.reporting.step_trace import StepTrace, Transfer
from npu_bridge.reporting.tail_report import measured_speeds


def step(*transfers, rank=0, backward_end_ms=30.0):
    """A step with transfers of (begin, wire, end, bytes)."""
    made = [
        Transfer(f"fragment_{n}", *times, fragment=n, size_bytes=size) for n, (*times, size) in enumerate(transfers)
    ]
    decision = Transfer("decision", 1.0, 1.0, 500.0, is_decision=True, size_bytes=4)
    return StepTrace(0, rank, 0.0, 100.0, backward_end_ms, (), (), (decision, *made))


def test_what_a_transfer_costs_and_what_each_byte_adds():
    """2 ms, and 40 ms for all bytes. A quarter of them is there after 15 ms, all after 30 ms: none after 10 ms."""
    speeds = measured_speeds([step((15.0, 16.0, 28.0, 1000), (30.0, 30.0, 62.0, 3000)), step((0, 0, 1, 1), rank=1)])
    assert speeds.forward_secs == pytest.approx(0.010)
    assert speeds.backward_secs == pytest.approx(0.020)
    assert speeds.transfer_secs == pytest.approx(0.002)
    assert speeds.exchange_secs == pytest.approx(0.040)


def test_transfers_of_one_size_say_nothing_about_what_each_costs():
    speeds = measured_speeds([step((15.0, 15.0, 25.0, 1000), (30.0, 30.0, 42.0, 1000))])
    assert speeds.transfer_secs == 0.0
    assert speeds.exchange_secs == pytest.approx(0.022)


def test_what_rounding_leaves_of_a_transfer_is_no_negative_time():
    transfers = [(30.0, 30.0, 30.0 + secs, 1000) for secs in (0.6, 0.7, 0.8)]
    for scale in range(1, 200):
        scaled = [(begin, wire, wire + (end - wire) * scale, size) for begin, wire, end, size in transfers]
        assert measured_speeds([step(*scaled)]).transfer_secs == 0.0


def test_a_large_transfer_that_was_quicker_than_a_small_one_is_noise():
    speeds = measured_speeds([step((15.0, 15.0, 25.0, 1000), (30.0, 30.0, 32.0, 3000))])
    assert speeds.transfer_secs == 0.0
    assert speeds.exchange_secs == pytest.approx(0.012)


def test_the_median_of_the_steps_counts():
    fast, slow = step((10.0, 10.0, 20.0, 1000)), step((10.0, 10.0, 90.0, 1000))
    assert measured_speeds([fast, slow, fast]).exchange_secs == pytest.approx(0.010)


def test_one_transfer_of_all_gradients_leaves_a_backward_pass():
    speeds = measured_speeds([step((30.0, 30.0, 70.0, 4000))])
    assert speeds.forward_secs == pytest.approx(0.010)
    assert speeds.backward_secs == pytest.approx(0.020)


def test_without_gradients_there_are_no_speeds():
    assert measured_speeds([step()]) is None
    assert measured_speeds([step((1.0, 1.0, 2.0, 0))]) is None
