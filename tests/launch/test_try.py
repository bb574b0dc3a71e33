"""`npu-run try` trains the first steps of a script and says whether it trains; it leaves nothing behind."""

from __future__ import annotations

import os

import pytest

from npu_bridge.launch.try_ import _numbers, _problem
from npu_bridge.reporting.history import StepRow
from tests.launch.launching import npu_run, write_script

FIT = """
import sys
import numpy as np
import tensorflow as tf
import npu_bridge
model = tf.keras.Sequential([tf.keras.layers.Dense(2, kernel_initializer="zeros", input_shape=(3,))])
model.compile(tf.keras.optimizers.SGD(0.0), "mse")
model.fit(np.ones([8, 3]), np.ones([8, 2]), batch_size=1)
open("written.txt", "w")
"""


def test_a_script_that_trains_and_one_that_does_not(tmp_path):
    write_script(tmp_path, FIT)
    code, output = npu_run("try", "--steps", 2, "train.py", "--", "--rate", "1", cwd=tmp_path)
    assert code == 0, output
    first, second, third = output.splitlines()
    assert first == "try: train.py, 2 steps on 1 rank, in a temporary folder"
    assert second.startswith("try: it trains: loss 1 -> 1, 8 parameters")
    assert third == "try: next, the whole training: npu-run train.py --rate 1"
    write_script(tmp_path, "print('begins')\nraise RuntimeError('no data')", "bad.py")
    code, output = npu_run("try", "bad.py", cwd=tmp_path)
    assert code == 1 and "  RuntimeError: no data\n" in output, output
    assert output.splitlines()[-1].endswith("exit code 1; its last lines are above")
    assert sorted(os.listdir(tmp_path)) == ["bad.py", "train.py"]


def _row(step, loss, skipped=False, time=0.0):
    return StepRow(step, loss, 8.0, skipped, time)


@pytest.mark.parametrize(
    "code, rows, problem",
    [
        (0, [], "no step of a session"),
        (3, [], "it ended before the end of its first step with exit code 3"),
        (3, [_row(1, 0.5)], "it ended after step 1 with exit code 3"),
        (0, [_row(1, 0.5), _row(2, float("nan"))], "the loss of step 2 is nan"),
        (0, [_row(0, float("inf"), skipped=True), _row(1, 0.5)], ""),
    ],
)
def test_what_is_wrong(code, rows, problem):
    found = _problem(code, rows)
    assert found.startswith(problem) and bool(found) == bool(problem)


def test_the_numbers():
    rows = [_row(0, 2.0, True, 10.0), _row(1, 1.5, time=10.5), _row(2, None, time=11.0)]
    assert _numbers(rows, 1234567) == (
        "loss 2 -> 1.5, skipped 1 of 3 steps, while the loss scale settles, 1,234,567 parameters, 2 steps/s after the "
        "first one"
    )
    assert _numbers([_row(1, None)], None) == "its loss is not known"
