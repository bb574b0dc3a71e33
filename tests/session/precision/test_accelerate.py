from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_bridge.options import AccelerateTrainMode, parse_accelerate_train_mode
from npu_bridge.session.precision.accelerate import (
    TrainingProgress,
    decide_switch,
    describe_plan,
    loss_threshold,
    parse_progress,
)
from npu_bridge.session.precision.modes import Policy
from tests.refusing import refuses


def by_step(ratio):
    return AccelerateTrainMode("float16", "step", float(np.float32(ratio)))


def by_loss(ratio):
    return AccelerateTrainMode("bfloat16", "loss", float(np.float32(ratio)))


@pytest.mark.parametrize("ratio", [0.2, 0.5, 0.9])
def test_a_training_of_one_run_has_no_switch(ratio):
    assert "no run" in describe_plan(by_step(ratio), TrainingProgress(10, 0), 10, "float32")


def test_only_the_threshold_itself_is_expected():
    assert decide_switch(by_step(0.5), TrainingProgress(10, 5)).is_expected
    assert not decide_switch(by_step(0.5), TrainingProgress(10, 6)).is_expected
    assert not decide_switch(by_step(0.9), TrainingProgress(10, 8), 4).is_expected
    assert decide_switch(by_loss(1.5), TrainingProgress(1.0, 1.2)).is_expected
    assert decide_switch(by_loss(1.5), TrainingProgress(float("nan"), 0.5)).runs_left != 0


@given(
    total=st.integers(1, 2**32 - 1),
    ratio=st.floats(0.25, 0.875, width=32),
    step=st.integers(0, 2**32 - 1),
    steps_per_run=st.integers(1, 5000),
)
def test_due_by_step_as_in_a_table(total, ratio, step, steps_per_run):
    # The product of two float32 numbers is exact in double precision; packing rounds it once.
    single = struct.unpack("f", struct.pack("f", total))[0]
    threshold = int(struct.unpack("f", struct.pack("f", single * ratio))[0])
    table = {(True, True): 0, (True, False): 0, (False, True): 0}
    is_due = (step >= threshold, step + steps_per_run >= total) in table
    assert (decide_switch(by_step(ratio), TrainingProgress(total, step), steps_per_run).runs_left == 0) == is_due


@given(
    total=st.integers(1, 400),
    ratio=st.floats(0.25, 0.875, width=32),
    step=st.integers(0, 400),
    steps_per_run=st.integers(1, 50),
)
def test_runs_left_are_what_a_walk_counts(total, ratio, step, steps_per_run):
    plan, walked = by_step(ratio), 0
    while decide_switch(plan, TrainingProgress(total, step + walked * steps_per_run), steps_per_run).runs_left:
        walked += 1
    assert decide_switch(plan, TrainingProgress(total, step), steps_per_run).runs_left == walked


@given(target=st.floats(-1e30, 1e30), ratio=st.floats(1.03125, 1.46875, width=32), loss=st.floats(allow_nan=True))
def test_due_by_loss_as_in_a_table(target, ratio, loss):
    threshold = struct.unpack("f", struct.pack("f", struct.unpack("f", struct.pack("f", target))[0] * ratio))[0]
    with np.errstate(over="ignore"):
        single = float(np.float32(loss))
    table = {(True, True): True}  # reported, and at or below the threshold
    is_due = table.get((single != 0.0, single <= threshold), False)
    assert (decide_switch(by_loss(ratio), TrainingProgress(target, loss)).runs_left == 0) == is_due
    assert loss_threshold(target, ratio) == np.float32(threshold)


@pytest.mark.parametrize(
    "trigger, goal, now, progress",
    [
        ("step", "10000", " 12\t", (10000, 12)),
        ("step", "4294967295", "0", (2**32 - 1, 0)),
        ("loss", "-1", "0.0", (-1.0, 0.0)),
        ("loss", "1e-3", " 2.5", (1e-3, 2.5)),
        ("loss", "2.0", "inf", (2.0, np.inf)),
    ],
)
def test_progress_is_read(trigger, goal, now, progress):
    assert parse_progress(trigger, goal, now) == progress


@refuses(
    ValueError,
    ("step", None, None, "TOTAL_STEP"),
    ("step", "10000.0", "x", "TOTAL_STEP"),
    ("step", "10", None, "STEP_NOW"),
    ("step", "10", "-1", "STEP_NOW"),
    ("step", "4294967296", "1", "TOTAL_STEP"),
    ("step", "10", " ", "STEP_NOW"),
    ("loss", None, "x", "TARGET_LOSS"),
    ("loss", "1.0", "1_0", "LOSS_NOW"),
    says=["TellMeStepOrLossHook"],
)
def test_unusable_progress_is_blamed_in_order(trigger, goal, now):
    parse_progress(trigger, goal, now)


@pytest.mark.parametrize(
    "text, progress, steps_per_run, line",
    [
        ("fast1|step", (10000, 0), 1, "steps 0-8999 in bfloat16, 9000-9999 in float32"),
        ("fast|step|0.9", (10, 0), 4, "steps 0-7 in float16, 8-9 in float32"),
        ("fast|step|0.5", (10, 8), 1, "steps 8-8 in float16, 9-9 in float32"),
        ("fast|loss|1.5", (2.0, 0.0), 1, "float16 until the loss is at most 3, then float32"),
    ],
)
def test_the_plan_in_words(text, progress, steps_per_run, line):
    assert (
        describe_plan(parse_accelerate_train_mode(text), TrainingProgress(*progress), steps_per_run, "float32") == line
    )


def test_the_plan_says_that_a_dtype_is_imitated():
    low = Policy("mixed", "float16", is_imitated=True).dtype_description
    plan = describe_plan(by_step(0.5), TrainingProgress(20, 0), 1, "float32", low)
    assert plan == "steps 0-9 in float16 (imitated), 10-19 in float32"
