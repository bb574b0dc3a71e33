"""Reading TensorFlow's record of a step: what operators are for, from the graph that ran."""

from __future__ import annotations

import pytest
from tensorflow.core.protobuf import config_pb2

from npu_bridge.reporting.step_reading import read_overlapping_steps, read_step
from npu_bridge.reporting.step_trace import shift_to_one_clock

START_MICROS = 1_700_000_000_000_000
FLOAT, INT32 = 1, 3
# name, operator, dtype, inputs, begin and end in ms
BACKWARD = [
    ("forward", "MatMul", FLOAT, [], 0, 3),
    ("grad_b", "MatMul", FLOAT, ["forward"], 3, 5),
    ("grad_a", "MatMul", FLOAT, ["grad_b:1"], 5, 8),
]


def record(*rows):
    """RunMetadata of a run of one device."""
    metadata = config_pb2.RunMetadata()
    graph = metadata.partition_graphs.add()
    device = metadata.step_stats.dev_stats.add(device="/job:localhost/replica:0/task:0/device:CPU:0")
    for name, kind, dtype, inputs, begin, end in rows:
        node = graph.node.add(name=name, op=kind, input=inputs)
        node.attr["T"].type = dtype
        device.node_stats.add(
            node_name=name, all_start_micros=START_MICROS + 1000 * begin, all_end_rel_micros=1000 * (end - begin)
        )
    return metadata


def test_a_step_is_cut_into_its_kinds():
    step = read_step(
        record(
            *BACKWARD,
            ("opt_fragment_0_float32", "HorovodGroupedAllreduce", FLOAT, ["grad_b"], 5, 9),
            ("decision", "HorovodAllreduce", INT32, ["grad_a"], 8, 10),
            # Held back until the first fragment is through: the gradient was there at 8 ms.
            ("copy", "Identity", FLOAT, ["grad_a", "^opt_fragment_0_float32"], 9, 11),
            ("opt_fragment_12_float32", "HorovodGroupedAllreduce", FLOAT, ["copy"], 11, 14),
            ("mean", "Mul", FLOAT, ["opt_fragment_12_float32:1"], 14, 15),
            ("weight/ApplyAdam", "ResourceApplyAdam", FLOAT, ["weight", "mean"], 15, 17),
        ),
        step=7,
        rank=1,
    )
    assert (step.step, step.rank, step.start_secs) == (7, 1, START_MICROS / 1e6)
    assert (step.duration_ms, step.backward_end_ms) == (17, 8)
    assert step.compute == ((0, 8),)
    assert step.updates == ((9, 11), (14, 17))
    assert [(transfer.fragment, transfer.is_decision) for transfer in step.transfers] == [
        (0, False),
        (None, True),
        (12, False),
    ]
    assert [transfer.wire_ms for transfer in step.transfers] == [5, 9, 11]  # one after the other
    assert step.exposed_intervals == [(8, 9), (11, 14)]


def test_a_transfer_of_the_forward_pass_does_not_make_updates_of_what_follows():
    step = read_step(
        record(
            ("moments", "HorovodAllreduce", FLOAT, [], 0, 1),
            ("normalized", "Mul", FLOAT, ["moments"], 1, 2),
            ("DistributedAdam_Allreduce/HorovodAllreduce_grad", "HorovodAllreduce", FLOAT, ["normalized"], 2, 5),
            ("apply", "ApplyAdam", FLOAT, ["DistributedAdam_Allreduce/HorovodAllreduce_grad"], 5, 6),
        ),
        step=0,
        rank=0,
    )
    assert step.compute == ((1, 2),)
    assert step.updates == ((5, 6),)
    assert step.backward_end_ms == 2


def test_one_rank_alone_has_no_tail():
    step = read_step(record(*BACKWARD, ("apply", "ApplyAdam", FLOAT, ["grad_a"], 9, 11)), step=0, rank=0)
    assert (step.backward_end_ms, step.exposed_intervals, step.transfers) == (8, [], ())


def test_gradients_are_followed_to_other_devices():
    metadata = record(
        ("grad", "MatMul", FLOAT, [], 0, 4),
        ("send", "_Send", FLOAT, ["grad"], 4, 4),
        ("receive", "_Recv", FLOAT, [], 0, 5),
        ("later", "MatMul", FLOAT, [], 6, 9),
        ("opt_fragment_0", "HorovodAllreduce", FLOAT, ["receive"], 5, 7),
    )
    for node in metadata.partition_graphs[0].node:
        if node.op in ("_Send", "_Recv"):
            node.attr["tensor_name"].s = b"edge_1_grad"
    step = read_step(metadata, step=0, rank=0)
    assert step.backward_end_ms == 4
    assert step.compute == ((0, 4), (6, 9))


def test_an_empty_record_is_said():
    with pytest.raises(ValueError, match="no operator of step 4"):
        read_step(config_pb2.RunMetadata(), step=4, rank=0)


def test_steps_of_a_loop_are_told_apart_and_what_waits_for_the_step_before_belongs_to_none():
    rows = [
        ("merge", "Merge", FLOAT, ["next"], 0, 0),
        ("gate", "Switch", FLOAT, ["merge"], 0, 0),
        ("forward", "MatMul", FLOAT, ["^gate"], 0, 3),
        ("grad", "MatMul", FLOAT, ["forward"], 3, 8),
        ("opt_fragment_0_float32", "HorovodGroupedAllreduce", FLOAT, ["grad"], 8, 20),
        ("weight/ApplyAdam", "ResourceApplyAdam", FLOAT, ["opt_fragment_0_float32"], 20, 21),
        ("only_once", "MatMul", FLOAT, [], 0, 50),
        ("next", "NextIteration", FLOAT, ["gate", "^weight/ApplyAdam"], 21, 21),
    ]
    metadata = record(*rows)
    # The next step computes from 9 ms on, and sends after the first one.
    for name, begin, end in (
        ("forward", 9, 12),
        ("grad", 12, 17),
        ("opt_fragment_0_float32", 17, 32),
        ("weight/ApplyAdam", 32, 33),
    ):
        metadata.step_stats.dev_stats[0].node_stats.add(
            node_name=name, all_start_micros=START_MICROS + 1000 * begin, all_end_rel_micros=1000 * (end - begin)
        )
    first, second = read_overlapping_steps(metadata, 7, 1)
    assert [(step.step, step.rank, step.duration_ms) for step in (first, second)] == [(6, 1, 21), (7, 1, 24)]
    assert [(step.compute, step.updates, step.backward_end_ms) for step in (first, second)] == [
        (((0, 8),), ((20, 21),), 8),
        (((0, 8),), ((23, 24),), 8),
    ]
    assert second.start_secs == pytest.approx(first.start_secs + 0.009, abs=1e-6)
    (_, moved) = shift_to_one_clock([first, second])
    (sent,) = moved.transfers
    assert (sent.begin_ms, sent.wire_ms, sent.end_ms) == pytest.approx((17, 20, 32), abs=1e-3)
    assert (moved.compute[0], moved.duration_ms) == (pytest.approx((9, 17), abs=1e-3), pytest.approx(33, abs=1e-3))


def test_a_record_without_a_loop_has_no_overlapping_steps():
    assert read_overlapping_steps(record(*BACKWARD), 3, 0) == []
