"""The switch as a machine: random trainings against a table of what each kind of run does."""

from __future__ import annotations

from unittest import mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from npu_bridge.base import environment
from npu_bridge.options import AccelerateTrainMode
from npu_bridge.session.precision.switch import Switch

GOALS = {"step": ("TOTAL_STEP", "10"), "loss": ("TARGET_LOSS", "2.0")}
NOWS = {"step": "STEP_NOW", "loss": "LOSS_NOW"}
# The meaning of a text of progress for a run under ratio 0.5 of 10 steps, one in a run, or 1.5 of the loss 2.0.
READINGS = {
    "step": {**dict.fromkeys(("0", " 3 ", "4"), "early"), **dict.fromkeys(("5", "9", "12"), "due")},
    "loss": {
        **dict.fromkeys(("0.0", "0", "3.1", "nan", "inf"), "early"),
        **dict.fromkeys(("3.0", "2.5", "-1", "-inf"), "due"),
    },
}
UNUSABLE = ("", "x", "-1.5.2", "1_0")
# (phase, is the first run, reading) to (phase of the run, phase afterwards); None is an error.
TABLE = {
    ("low", True, "early"): ("low", "low"),
    ("low", True, "due"): ("low", "low"),
    ("low", True, "unusable"): None,
    ("low", False, "early"): ("low", "low"),
    ("low", False, "due"): ("original", "original"),
    ("low", False, "unusable"): ("low", "low"),
    ("original", True, "early"): ("original", "original"),
    ("original", True, "due"): ("original", "original"),
    ("original", True, "unusable"): ("original", "original"),
    ("original", False, "early"): ("original", "original"),
    ("original", False, "due"): ("original", "original"),
    ("original", False, "unusable"): ("original", "original"),
}
TRIGGERS = st.sampled_from(["step", "loss"])


@st.composite
def trainings(draw):
    """A trigger, and for each run which of two graphs it trains and what the variable says."""
    trigger = draw(TRIGGERS)
    texts = st.sampled_from([*READINGS[trigger], *UNUSABLE])
    return trigger, draw(st.lists(st.tuples(st.sampled_from("ab"), texts), max_size=12))


@given(trainings())
def test_a_training_follows_the_table(training):
    trigger, runs = training
    ratio = float(np.float32(0.5 if trigger == "step" else 1.5))
    goal, text = GOALS[trigger]
    with mock.patch.dict("os.environ"):
        environment.write_variable(goal, text)
        switch, phase, started = Switch(AccelerateTrainMode("float16", trigger, ratio)), "low", set()
        for graph, now in runs:
            environment.write_variable(NOWS[trigger], now)
            expected = TABLE[phase, graph not in started, READINGS[trigger].get(now, "unusable")]
            try:
                seen = "original" if switch.must_use_original_precision(frozenset({graph})) else "low"
            except ValueError:
                assert expected is None
                continue
            started.add(graph)
            assert expected is not None
            run, phase = expected
            assert seen == run
            assert switch.has_happened == (phase == "original")
