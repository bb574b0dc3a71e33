"""The order of transfers in steps that overlap, and what is read from a step whose operators were timed."""

from __future__ import annotations

import pytest
import tensorflow as tf

from npu_bridge.base import environment
from npu_bridge.collective import order_on_the_wire
from npu_bridge.collective.order_on_the_wire import dependencies_for_order, measure_overlap, order_for_forward_pass
from npu_bridge.graph.operators import computed_ops

COUNT = 6


@pytest.fixture
def step(monkeypatch):
    """The operators of a step, and what stands for its transfers: nothing is sent here."""
    monkeypatch.setattr(order_on_the_wire, "COLLECTIVE_TYPES", ("Cos",))
    with tf.Graph().as_default():
        transfers = []
        for number in range(COUNT):
            gradient = tf.sin(tf.fill([1000], 1.0), name=f"gradient_{number}")
            with tf.control_dependencies(transfers[-2:-1]):
                entry = tf.identity(gradient, name=f"entry_{number}")
            transfers.append(tf.cos(entry, name=f"sent_{number}").op)
        return computed_ops(transfers), transfers


@pytest.mark.parametrize(
    ("early", "order"), [(0.0, [5, 4, 3, 2, 1, 0]), (0.5, [0, 1, 2, 5, 4, 3]), (1.0, [0, 1, 2, 3, 4, 5])]
)
def test_last_layers_go_first_while_there_are_no_others_then_the_first_ones(step, early, order):
    ops, transfers = step
    assert order_for_forward_pass(transfers, early) == [transfers[number] for number in order]


def test_few_are_under_way_and_earlier_waits_are_gone(step, monkeypatch):
    ops, transfers = step
    monkeypatch.setenv("NPU_TRANSFERS_IN_FLIGHT", "2")
    order = order_for_forward_pass(transfers, 0.5)
    waits = dependencies_for_order(ops, order)
    assert {op.name: [other.name for other in others] for op, others in waits.items()} == {
        "entry_0": [],
        "entry_1": [],
        "entry_2": ["sent_0"],
        "entry_5": ["sent_1"],
        "entry_4": ["sent_2"],
        "entry_3": ["sent_5"],
    }


def test_what_was_on_the_wire_before_the_backward_pass_was_over_goes_early(step):
    ops, transfers = step
    events = {f"gradient_{number}": (10.0 * number, 10.0 * number + 10) for number in range(COUNT)}
    events.update({f"sent_{number}": (10.0 * number, 25.0 * number + 30) for number in range(COUNT)})
    # The last gradient is there at 60, and the third transfer is on the wire from 55 on.
    assert measure_overlap(ops, transfers, events) == (3 / COUNT, 155.0 - 60.0)
    assert measure_overlap(ops, transfers, {}) == (0.0, 0.0)


def test_another_value_is_refused(monkeypatch):
    monkeypatch.setenv("NPU_OVERLAPPED_STEPS", "yes")
    with pytest.raises(ValueError, match="NPU_OVERLAPPED_STEPS has an unknown value.*0 or 1.*'yes'"):
        environment.read_overlapped_steps()
